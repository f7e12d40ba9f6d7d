# shellcheck shell=bash
# What every entry script sources. bash reads the arguments and finds the Python; then it hands
# over to launcher/start.py, which plans, checks, starts and watches.

set +o posix # where sh is bash

# Prints a path by the name under which the user reaches it. Where a link leads there, the other nodes
# may have that name alone: here /home is a link to /export/home.
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
ROOT=$(as_typed "$ROOT" "$PWD" "$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)")
PROGRAM=${0##*/}
case $PROGRAM in *.SC | slurm_script) # a scheduler's copy
  PROGRAM=$(sed -n 's|^# usage: .*/\([a-z_]*\.sh\).*|\1|p' "$0") ;;
esac
declare -A PLAN=()    # what was typed, by the names of start.py's options
declare -A OPTIONS=() # the script's own options: the PLAN entry of each one's value; !entry: it takes none; @: the agent's
TYPED=()              # the whole command line
NODES=()              # the arguments named "nodes..."
SETTINGS=()           # key=value, in order
REST=()               # what follows `--`
PASSED=()             # options that the node agent reads
FLAGS=()              # of start.py: --dry-run, --strict, --detach
ACTIVATED=()          # names of variables that the environment of PYTHON has changed

SCHEDULED=${SLURM_JOB_ID:-${PBS_JOBID:-}} # not empty: a scheduler holds the run

[[ -z ${TORCHELASTIC_RUN_ID:-} ]] || unset "${!PET_@}" # a launch by a rank: launcher/outer_run.py

# shellcheck source=scripts/lib/arguments.sh
source "${BASH_SOURCE[0]%/*}/arguments.sh"
# shellcheck source=scripts/lib/python.sh
source "${BASH_SOURCE[0]%/*}/python.sh"
# shellcheck source=scripts/lib/stage.sh
source "${BASH_SOURCE[0]%/*}/stage.sh"
# shellcheck source=scripts/lib/site.sh
source "${BASH_SOURCE[0]%/*}/site.sh"

die() { # <exit code> <"cause; cure">
  printf '%s: %s\n' "$PROGRAM" "$2" >&2
  exit "$1"
}

refuse() { # <fault of TROUBLESHOOTING.md> <"cause; cure">
  local host
  host=$(uname -n)
  die 3 "${host%%.*}: $2 [$1]"
}

# For the scripts whose CONFIG may be left out. A training script of the user's needs none.
default_config() {
  FLAGS+=(--default-config)
}

# An edited copy of our batch script is what a resume line names; a scheduler's own copy is not.
name_batch_script() { # <ours> <the file that was submitted or started>
  PLAN[batch_script]=$1
  [[ $2 -ef $ROOT/$1 || $2 == */slurm_script || $2 == *.SC ]] || PLAN[batch_script]=$(realpath -s -- "$2")
}

# Hands all that was typed to start.py; does not return.
launch() { # <fan-out or other task> <more options of start.py...>
  local name command
  pwd -P &>/dev/null || die 2 "the working directory has been removed; cd to one that exists"
  for name in launcher/start.py distributed/environment.py; do
    [[ -r $ROOT/$name ]] ||
      die 2 "there is no $name in $ROOT; keep scripts/, launcher/ and distributed/ of this project together (make init DIR=...)"
  done
  read_site
  choose_inside
  choose_python
  stage_python "$1"
  command=("$PYTHON" "$ROOT/scripts/lib/start.py" "$@" "${FLAGS[@]}")
  command+=(--directory="$PWD" --program="$PROGRAM" --usage="$(usage_line)" --python="$PYTHON")
  for name in "${!PLAN[@]}"; do command+=("--$name=${PLAN[$name]}"); done
  command+=("${TYPED[@]/#/--typed=}" "${NODES[@]/#/--node=}" "${SETTINGS[@]/#/--setting=}")
  command+=("${PASSED[@]/#/--passed=}" "${ACTIVATED[@]/#/--activated=}")
  exec "${command[@]}" -- "${REST[@]}"
}

# Runs a module that is no launcher, in any folder and beside any package; does not return.
run_tool() { # <module> <argument...>
  local command
  case ${2:-} in
    -h | --help) print_header && exit ;;
    --version) parse_arguments "" "$2" ;;
  esac
  read_site
  choose_python
  command=("$PYTHON" "$ROOT/scripts/lib/start.py" "$@")
  [[ ${2:-} != --dry-run ]] || { unset 'command[3]' && echo "${command[*]@Q}" && exit; }
  exec "${command[@]}"
}
