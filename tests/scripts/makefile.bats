#!/usr/bin/env bats
load helper

@test "make lists its targets, each with its description" {
  run make -C "$ROOT"
  [[ $status == 0 ]]
  local target
  for target in init setup train test test-fast lint clean; do
    [[ $output == *"make $target "* ]]
  done
}

# bats test_tags=slow,long
@test "make bench-gpu without a GPU says so in one line" {
  CUDA_VISIBLE_DEVICES='' run make -s -C "$ROOT" bench-gpu PYTHON="$PYTHON" STAMP=
  [[ $status != 0 && ${lines[0]} == "bench/gpu.py: torch sees no GPU here; "* ]]
}

@test "make setup reports what is wrong with python3" {
  cp "$ROOT/Makefile" "$ROOT/requirements.txt" .
  fake_tool python3 'exit 1'
  run make setup
  [[ $status != 0 && ${lines[0]} == "make: python3 is missing or older than 3.10; install "* ]]
  # shellcheck disable=SC2016 # expanded by the tool
  fake_tool python3 '[[ $2 == *version_info* ]]'
  run make setup
  [[ $status != 0 && ${lines[0]} == "make: python3 has no venv module; install it "* ]]
}

@test "make setup installs again only when the requirements change" {
  cp "$ROOT/Makefile" "$ROOT/requirements.txt" .
  fake_tool python3 'mkdir -p .venv/bin && touch .venv/bin/pip && printf "#!/bin/sh\necho pip >>said\n" >.venv/bin/python && chmod +x .venv/bin/python'
  make setup
  make setup
  [[ $(<said) == pip ]]
  touch -d "+1 minute" requirements.txt
  make setup
  [[ $(wc -l <said) == 2 ]]
}

@test "make setup adds pip to a .venv of uv, which has none" {
  cp "$ROOT/Makefile" "$ROOT/requirements.txt" .
  mkdir -p .venv/bin
  # shellcheck disable=SC2016 # expanded by the fake Python
  printf '%s\n' '#!/bin/sh' 'echo "$2" >>said' '[ "$2" != ensurepip ] || [ ! -e without ]' >.venv/bin/python
  chmod +x .venv/bin/python
  make setup
  [[ $(<said) == $'ensurepip\npip' ]]
  touch -d "+1 minute" requirements.txt
  touch without
  run make setup
  [[ $status != 0 && $output == *"make: .venv/bin/python has no pip; run uv pip install "* ]]
}

@test "tests see neither the scheduler nor the settings of the machine" {
  fake_tool sinfo ''
  fake_tool ours 'echo ours'
  module() { echo theirs; }
  export -f module
  # shellcheck disable=SC2016 # expanded by the isolated shell
  SLURM_JOB_ID=7 RUN_ID=theirs LC_ALL=POSIX run bash -euc 'umask 077; source "$0"; isolate "$PWD/links"
    ! type -P sinfo && ! declare -F module && ours; echo "${SLURM_JOB_ID-} ${RUN_ID-} $LANG ${LC_ALL-} $(umask)"' "$ROOT/tests/isolate.bash"
  [[ $output == $'ours\n  C.UTF-8  0022' && -L links/$PWD/fake/ours && $HOME == *.home && -z $(ls -A "$HOME") ]]
}

@test "the tests keep what bats 1.11 passes to the shell in which it lists them" {
  # shellcheck disable=SC2016 # expanded by the shell that lists
  run env -u BATS_ISOLATED -u BATS_TEST_TMPDIR -u BATS_FILE_TMPDIR TESTS_LIST_FILE=list filter=words filter_status= \
    bash -euc 'source "$0"; isolate_test; echo "$TESTS_LIST_FILE $filter ${filter_status-unset}"; cd "$HOME"' "$ROOT/tests/isolate.bash"
  [[ $status == 0 && $output == "list words " && ! -e .home ]]
}

# bats test_tags=slow
@test "make init puts the kit into one folder of a repository, and changes nothing else" {
  mkdir -p own/scripts
  echo mine | tee own/train.py own/scripts/launch.sh >own/README.md
  run make -s -C "$ROOT" init DIR="$PWD/own"
  [[ $status == 0 && $output == *"launch-kit/scripts/launch.sh --nproc-per-node 2 YOUR_SCRIPT.py" ]]
  [[ $(cat own/train.py own/scripts/launch.sh own/README.md) == $'mine\nmine\nmine' ]]
  [[ $(ls own) == $'README.md\nlaunch-kit\nscripts\ntrain.py' ]]
  (cd own && launch-kit/scripts/launch.sh --dry-run train.py) >planned
  [[ $(<planned) == *" $PWD/own/launch-kit/scripts/lib/agent.py "*" train.py" ]]
  (cd own && launch-kit/scripts/ssh/launch_singlenode.sh --dry-run ../plain.yaml 1) >planned
  [[ $(<planned) == *" $PWD/own/launch-kit/train.py --config ../plain.yaml" ]]
}

@test "make init: a bad DIR is refused in one line" {
  mkdir -p own/launch-kit
  run bash "$ROOT/scripts/lib/init.sh" own
  assert_refused 2 "'own/launch-kit' exists; nothing was changed"
  [[ -z $(ls -A own/launch-kit) ]]
  run bash "$ROOT/scripts/lib/init.sh" nowhere
  assert_refused 2 "there is no folder 'nowhere'; correct DIR"
  run bash "$ROOT/scripts/lib/init.sh" ""
  assert_refused 2 "DIR is not set; run make init DIR=YOUR_REPOSITORY"
}

@test "make test-gpu, make test-nccl and make test-torch keep the packages that PYTHONPATH brings" {
  printf '%s\n' '#!/bin/sh' 'env | grep ^PYTHONPATH=' >python
  chmod +x python
  local target
  for target in test-gpu test-nccl test-torch; do
    PYTHONPATH=/site/packages run make -s -C "$ROOT" "$target" PYTHON="$PWD/python"
    [[ ${lines[-1]} == PYTHONPATH=*bench:/site/packages ]]
  done
}

@test "make plot and make sample without a run say so, and install nothing" {
  local target
  for target in plot sample; do
    run make -s -C "$ROOT" "$target" VENV="$PWD/venv"
    [[ $status == 2 && $output == "make: give RUN=, a run id"* && ! -e venv ]]
  done
}

# A Python that has only the packages named, and prints what else it is asked to do.
make_python() { # <package...>
  mkdir -p packages
  local package
  for package in "$@"; do echo >"packages/$package.py"; done
  # shellcheck disable=SC2016 # expanded by that Python
  printf '%s\n' '#!/bin/sh' 'case $1 in' '*lacking.py) exec python3 -S "$@" ;;' '*) echo "$@" ;;' 'esac' >given
  chmod +x given
  export PYTHONPATH=$PWD/packages
}

@test "make installs nothing into a given Python, and names what it lacks" {
  make_python torch
  local target words
  for target in train "sample RUN=r" bench-step test; do
    read -ra words <<<"$target"
    run make -s -C "$ROOT" "${words[@]}" PYTHON="$PWD/given" VENV="$PWD/venv"
    [[ $status == 2 && ${lines[0]} == "make: "*" lacks "*"PyYAML"*"; run "*" -m pip install "*"PyYAML"*", or omit PYTHON" ]]
    [[ ${lines[1]} == "make: *** "*"Error 3" && ${#lines[@]} == 2 ]]
  done
  PYTHON=$PWD/given run make -s -C "$ROOT" plot RUN=r VENV="$PWD/venv" # in the environment
  [[ $status == 2 && ${lines[0]} == "make: "*" lacks matplotlib; "* && ! -e venv ]]
  run make -s -C "$ROOT" train PYTHON="$PWD/none" VENV="$PWD/venv"
  [[ ${lines[0]} == "make: there is no Python at $PWD/none; correct PYTHON" && ! -e venv ]]
}

@test "make plot runs a given Python that has what it needs" {
  make_python matplotlib
  run make -s -C "$ROOT" plot RUN=r VENV="$PWD/venv" PYTHON="$PWD/given"
  [[ $status == 0 && $output == "-m training.plot r" && ! -e venv ]]
}

@test "make train passes settings on" {
  run make -n -C "$ROOT" train STAMP= NPROC=2 train.max_steps=20 seed=1 data.path=text
  [[ $output == *"launch_singlenode.sh config/local3.yaml 2 data.path=text train.max_steps=20"* ||
    $output == *"launch_singlenode.sh config/local3.yaml 2 train.max_steps=20 data.path=text"* ]]
}
