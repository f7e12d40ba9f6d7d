# shellcheck shell=bash
# Isolates a test from its machine and its user. The helpers of the tests source this file, and
# tests/unit/conftest.py uses the environment that it sets up.

KEPT='PATH|PWD|SHLVL|TERM|TMPDIR|USER|LOGNAME|LD_LIBRARY_PATH|CI|PYTHON|TIMES|(BATS|PYTEST)_.*'
KEPT+='|TESTS_LIST_FILE|n?filter|filter_status' # of bats 1.11 and later, which lists the tests first
SCHEDULER_TOOLS=( # SLURM's, then those of PBS, LSF and Grid Engine
  sinfo squeue sbatch srun salloc scontrol scancel sacct sacctmgr sattach sbcast sprio sshare sstat
  qstat qsub qdel qalter qhost pbsnodes bsub bjobs lsid
)

# Called when bats loads a helper: isolates each file once, and gives each test its own HOME.
isolate_test() {
  local root=${BASH_SOURCE[0]%/*}/..
  if [[ ${BATS_ISOLATED:-} != "${BATS_RUN_TMPDIR:?}" ]]; then
    isolate "$BATS_RUN_TMPDIR/path"
    export BATS_ISOLATED=$BATS_RUN_TMPDIR # an outer bats has another value
    export PYTHON=${PYTHON:-$(cd -- "$root" && pwd -P)/.venv/bin/python}
    type -P "$PYTHON" >/dev/null || PYTHON=$(type -P python3)
  fi
  export HOME=${BATS_TEST_TMPDIR:-${BATS_FILE_TMPDIR:-$BATS_RUN_TMPDIR/list}}.home
  mkdir -p -- "$HOME"
}

# Keeps only the variables in KEPT; sets a plain locale and umask, and a PATH without schedulers.
isolate() { # <folder for the links>
  local name
  for name in $(compgen -e); do
    [[ $name =~ ^($KEPT)$ ]] || unset "$name"
  done
  while read -r _ _ name; do
    [[ $name == bats_* ]] || unset -f "$name" # such as module
  done < <(declare -Fx)
  umask 022
  export LANG=C.UTF-8 RES_OPTIONS='timeout:1 attempts:1' # for a name server that loses a packet
  hide_schedulers "$1"
}

# Replaces each folder of PATH that has a scheduler's tools with links to its other tools.
hide_schedulers() { # <folder for the links>
  local folder tool folders path=
  IFS=: read -ra folders <<<"$PATH"
  for folder in "${folders[@]}"; do
    for tool in "${SCHEDULER_TOOLS[@]}"; do
      [[ -x $folder/$tool ]] || continue
      link_others "$folder" "$1$folder"
      folder=$1$folder
      break
    done
    path+=:$folder
  done
  PATH=${path#:}
}

link_others() { # <folder of tools> <folder to make, if no other test has>
  local new=$2.$BASHPID
  [[ ! -d $2 ]] || return 0
  mkdir -p -- "$new"
  ln -s -- "$1"/* "$new"
  (cd -- "$new" && rm -f -- "${SCHEDULER_TOOLS[@]}")
  mv -T -- "$new" "$2" 2>/dev/null || rm -r -- "$new"
}
