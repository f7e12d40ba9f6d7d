# shellcheck shell=bash
# Every entry script sources this file. bash only finds the Python: launcher/cli/ has the grammar.
# What lives until the exec begins with KIT_: bash exports a name that the user has exported.

set +o posix # if sh is bash
unset CDPATH # with it, cd prints a path, and may find another folder
unset -f cd  # an exported function may print, too

# Prints a path as the user names it. If that name contains a link, other nodes may have only that
# name: for example, /home may be a link to /export/home on this machine.
as_typed() { # <path without links> <folders as typed...>
  local path real
  for path in "${@:2}"; do
    real=$(cd -P -- "$path" 2>/dev/null && pwd) || continue
    while [[ $path != "$real" && ${path##*/} == "${real##*/}" && ${path%/*}/ -ef ${real%/*}/ ]]; do
      path=${path%/*} real=${real%/*}
    done
    [[ $path == "$real" || $1/ != "$real"/* ]] || { echo "$path${1#"$real"}" && return; }
  done
  echo "$1"
}

KIT_ROOT=$(cd -P -- "${BASH_SOURCE[0]%/*}/../.." 2>/dev/null && pwd)
KIT_ROOT=$(as_typed "$KIT_ROOT" "$PWD" "$(cd -- "$(dirname -- "$0")" 2>/dev/null && pwd)")
[[ ${0##*/} == @(*.SC|slurm_script) ]] || KIT_NAME=${0##*/} # schedulers' copies set it themselves
KIT_NAME=${KIT_NAME:-$(sed -n 's|^# usage: .*/\([a-z_]*\.sh\).*|\1|p' "$0")}
KIT_FILE=${KIT_FILE:-$0} # or the file that a scheduler was given
KIT_ACTIVATED=()         # names of the variables that the environment of PYTHON has changed
KIT_INSIDE=''            # the Python in the container
KIT_SITE_ROW=''          # a row of the plan

source "$KIT_ROOT/scripts/lib/python.sh"
source "$KIT_ROOT/scripts/lib/site.sh"

die() { # <exit code> <"cause; cure", in one word or more>
  printf '%s: %s\n' "$KIT_NAME" "${*:2}" >&2
  exit "$1"
}

refuse() { # <"cause; cure", in one word or more>: this machine lacks something
  set -- "$(uname -n)" "$*"
  die 3 "${1%%.*}: $2 [env-missing]"
}

# Starts a command of launcher/cli/options.py; does not return. LAUNCH_AS: pip's name for it.
# PBS starts a script that was submitted directly in the home folder.
run_command() { # <command> <word...>
  KIT_SCRIPT=${LAUNCH_AS:-$0}
  [[ $KIT_SCRIPT == */* ]] || KIT_SCRIPT=./$KIT_SCRIPT
  unset LAUNCH_AS
  answer "${2:-}" "$1"
  [[ ${PBS_ENVIRONMENT:-} != PBS_BATCH || $0 != /* || ! . -ef ~ ]] || cd -- "$PBS_O_WORKDIR"
  prepare
  read_site
  choose_inside
  choose_python
  exec "$PYTHON" "$KIT_ROOT/scripts/lib/start.py" "$1" "$KIT_NAME" "$KIT_FILE" "$PWD" \
    "${KIT_INSIDE:-$PYTHON}" "$KIT_SITE_ROW" "${KIT_ACTIVATED[*]}" "$KIT_SCRIPT" "${@:2}"
}

prepare() { # for signals; ends this process if the kit or the working directory is incomplete
  local s name
  for s in HUP USR1 USR2 TERM; do
    # shellcheck disable=SC2064 # of this signal
    trap "echo 'stopped  by SIG$s; nothing was started' >&2; exit $((128 + $(kill -l "$s")))" "$s"
  done
  pwd -P &>/dev/null ||
    die 2 "the working directory has been removed; cd to one that exists [dir-unwritable]"
  for name in launcher/start.py distributed/environment.py; do
    [[ -r $KIT_ROOT/$name ]] || die 2 "there is no $name in $KIT_ROOT; keep scripts/, launcher/" \
      "and distributed/ of this project together (make init DIR=...) [env-missing]"
  done
}

# Edited copies of older batch scripts call this.
parse_arguments() {
  die 2 "this is a copy of an older script; copy the new one, and edit it again [config-invalid]"
}

# Runs a script that is not a launcher; does not return.
run_tool() { # <argument...>
  answer "${1:-}" ''
  read_site
  choose_python
  exec "$PYTHON" "$KIT_ROOT/scripts/lib/start.py" launcher.cli.tools "${LAUNCH_AS:-$KIT_NAME}" "$@"
}

# Answers options that need no Python. Above entries, help.txt names the commands that show them.
answer() { # <first word> <command, or '' if the header of the script is the whole help>
  local codes
  [[ $1 == @(-h|--help|--version) ]] || return 0
  print_answer "$@" | cat 2>/dev/null && exit
  codes=("${PIPESTATUS[@]}")
  ((codes[1] != 1)) || die 1 "cannot write the output; free some disk space [disk-full]"
  exit $((codes[1] == 141 ? 0 : codes[0])) # 141: the reader has closed the pipe
}

print_answer() { # <-h|--help|--version> <command>
  if [[ $1 == --version ]]; then
    sed -n "s/^__version__ = \"\(.*\)\"$/$KIT_NAME \1/p" "$KIT_ROOT/distributed/__init__.py"
    return
  fi
  # A backslash at the end joins two lines.
  sed -n '1d; /^#/!q; /^#[A-Z]/d; / \\$/{N; s/\\\n# *//}; s/^# \{0,1\}//; p' "$0" || return
  [[ -n $2 ]] || return 0
  ! grep -q '^# usage: .* NODE\.\.\.' "$0" || { echo && cat "$KIT_ROOT/scripts/lib/nodes.txt"; }
  echo
  [[ $1 != -h ]] || { echo "--help also shows the options and variables of $KIT_NAME." && return; }
  sed -nE "/^#/{h;d};G;/\n#!.* $2( |\$)/d;/\n#(!|.* $2( |\$)|\$)/P" "$KIT_ROOT/scripts/lib/help.txt"
}
