# shellcheck shell=bash
# Every entry script sources this file. bash only finds the Python, and passes all arguments to it
# unparsed: launcher/cli/ has the grammar.

set +o posix # if sh is bash
unset CDPATH # with it, cd prints a path, and may find another folder
unset -f cd  # an exported function may print, too

# Prints a path as the user names it. If that name contains a link, other nodes may have only that
# name: for example, /home may be a link to /export/home on this machine.
as_typed() { # <path without links> <folders as typed...>
  local typed real
  for typed in "${@:2}"; do
    real=$(cd -P -- "$typed" 2>/dev/null && pwd) || continue
    while [[ $typed != "$real" && ${typed##*/} == "${real##*/}" && ${typed%/*}/ -ef ${real%/*}/ ]]; do
      typed=${typed%/*} real=${real%/*}
    done
    [[ $typed == "$real" || $1/ != "$real"/* ]] || { echo "$typed${1#"$real"}" && return; }
  done
  echo "$1"
}

ROOT=$(cd -P -- "${BASH_SOURCE[0]%/*}/../.." && pwd)
ROOT=$(as_typed "$ROOT" "$PWD" "$(cd -- "$(dirname -- "$0")" && pwd)")
PROGRAM=${0##*/}
case $PROGRAM in *.SC | slurm_script) # a scheduler's copy
  PROGRAM=$(sed -n 's|^# usage: .*/\([a-z_]*\.sh\).*|\1|p' "$0")
  ;;
esac
SUBMITTED=$0 # or the file that a scheduler was given
ACTIVATED=() # names of the variables that the environment of PYTHON has changed
INSIDE=''    # the Python in the container
SITE_ROW=''  # a row of the plan

# shellcheck source=scripts/lib/python.sh
source "$LIB/python.sh"
# shellcheck source=scripts/lib/site.sh
source "$LIB/site.sh"

die() { # <exit code> <"cause; cure">
  printf '%s: %s\n' "$PROGRAM" "$2" >&2
  exit "$1"
}

refuse() { # <fault of TROUBLESHOOTING.md> <"cause; cure">
  local host
  host=$(uname -n)
  die 3 "${host%%.*}: $2 [$1]"
}

# Starts a command of launcher/cli/options.py; does not return.
run_command() { # <command> <word...>
  local name
  local script=${LAUNCH_AS:-$0} # a command that pip installed has its own name
  [[ $script == */* ]] || script=./$script
  unset LAUNCH_AS
  answer "${2:-}" "$1"
  for name in HUP USR1 USR2 TERM; do
    # shellcheck disable=SC2064 # of this name
    trap "echo 'stopped  by SIG$name; nothing was started' >&2; exit $((128 + $(kill -l "$name")))" "$name"
  done
  pwd -P &>/dev/null || die 2 "the working directory has been removed; cd to one that exists [dir-unwritable]"
  for name in launcher/start.py distributed/environment.py; do
    [[ -r $ROOT/$name ]] ||
      die 2 "there is no $name in $ROOT; keep scripts/, launcher/ and distributed/ of this project together (make init DIR=...) [env-missing]"
  done
  read_site
  choose_inside
  choose_python
  exec "$PYTHON" "$ROOT/scripts/lib/start.py" "$1" "$PROGRAM" "$SUBMITTED" "$PWD" "${INSIDE:-$PYTHON}" \
    "$SITE_ROW" "${ACTIVATED[*]}" "$script" "${@:2}"
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
  exec "$PYTHON" "$ROOT/scripts/lib/start.py" launcher.cli.tools "${LAUNCH_AS:-$PROGRAM}" "$@"
}

# Answers options that need no Python. Above entries, help.txt names the commands that show them.
answer() { # <first word> <command, or '' if the header of the script is the whole help>
  local print codes
  case $1 in
    -h | --help) print=print_help ;;
    --version) print=print_version ;;
    *) return ;;
  esac
  "$print" "$@" | cat 2>/dev/null && exit
  codes=("${PIPESTATUS[@]}")
  ((codes[1] != 1)) || die 1 "cannot write the output; free some disk space [disk-full]"
  exit $((codes[1] == 141 ? 0 : codes[0])) # 141: the reader has closed the pipe
}

print_version() {
  echo "$PROGRAM $(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$ROOT/distributed/__init__.py")"
}

print_help() { # <-h|--help> <command>
  sed -n '1d; /^#/!q; /^#[A-Z]/d; s/^# \{0,1\}//; p' "$0" || return
  [[ -n $2 ]] || return 0
  ! grep -q '^# usage: .* NODE\.\.\.' "$0" || { echo && cat "$ROOT/scripts/lib/nodes.txt"; }
  [[ $1 == --help ]] || { printf '\n--help also shows the options and variables of %s.\n' "$PROGRAM" && return; }
  echo && sed -nE "/^#/{h;d};G;/\n#(.* $2( |\$)|\$)/P" "$ROOT/scripts/lib/help.txt"
}
