#!/usr/bin/env bats
load helper

@test "make lists its targets, each with what it does" {
  run make -C "$ROOT"
  [[ $status == 0 ]]
  local target
  for target in setup train test test-fast lint clean; do
    [[ $output == *"make $target "* ]]
  done
}

@test "make setup says what is wrong with python3" {
  cp "$ROOT/Makefile" "$ROOT/requirements.txt" .
  fake_tool python3 'exit 1'
  run make setup
  [[ $status != 0 && ${lines[0]} == "make: python3 is missing or older than 3.10; install "* ]]
  # shellcheck disable=SC2016 # for the tool
  fake_tool python3 '[[ $2 == *version_info* ]]'
  run make setup
  [[ $status != 0 && ${lines[0]} == "make: python3 has no venv module; install it "* ]]
}

@test "make setup installs again only when the requirements change" {
  cp "$ROOT/Makefile" "$ROOT/requirements.txt" .
  fake_tool python3 'mkdir -p .venv/bin && printf "#!/bin/sh\necho pip >>said\n" >.venv/bin/python && chmod +x .venv/bin/python'
  make setup
  make setup
  [[ $(<said) == pip ]]
  touch -d "+1 minute" requirements.txt
  make setup
  [[ $(wc -l <said) == 2 ]]
}

@test "tests see neither the scheduler nor the settings of the machine" {
  fake_tool sinfo ''
  fake_tool ours 'echo ours'
  module() { echo theirs; }
  export -f module
  # shellcheck disable=SC2016 # for the shell that is isolated
  SLURM_JOB_ID=7 RUN_ID=theirs LC_ALL=POSIX run bash -euc 'umask 077; source "$0"; isolate "$PWD/links"
    ! type -P sinfo && ! declare -F module && ours; echo "${SLURM_JOB_ID-} ${RUN_ID-} $LANG ${LC_ALL-} $(umask)"' "$ROOT/tests/isolate.bash"
  [[ $output == $'ours\n  C.UTF-8  0022' && -L links/$PWD/fake/ours && $HOME == *.home && -z $(ls -A "$HOME") ]]
}
