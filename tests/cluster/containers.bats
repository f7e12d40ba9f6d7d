#!/usr/bin/env bats
# Runs in containers (Charliecloud, podman), and runs from copies of a Python environment: on this
# machine, over ssh and under SLURM.
# shellcheck disable=SC2030,SC2031 # each test is a subshell, and is meant to be one
bats_require_minimum_version 1.5.0
load helper

ROOT=$(cd -- "$BATS_TEST_DIRNAME/../.." && pwd -P)
SMALL=(train.max_steps=6 train.eval_every=0 train.global_batch_size=12 model.layers=1 model.width=16)
LONG=("${SMALL[@]}" train.max_steps=100000 checkpoint.every=0)

setup_file() {
  cluster_up 2
  make_image "$BATS_FILE_TMPDIR/image"
}

teardown_file() {
  cluster_down
}

setup() {
  cd -- "$BATS_TEST_TMPDIR" || return
  ln -s -- "$ROOT"/{config,scripts} .
  IMAGE=$BATS_FILE_TMPDIR/image
  export OMP_NUM_THREADS=1 USER=${USER:-root} LOG_DIR=$PWD/logs
}

# Prints the folders that the image lacks: those of this machine's Python and its libraries.
folders() {
  echo /usr
  "$PYTHON" -c 'import os, sys; print(*(os.path.realpath(p) for p in {sys.prefix, sys.base_prefix} if p != "/usr"), sep="\n")'
}

# Makes an image with its own root and /etc.
make_image() { # <folder>
  local folder
  mkdir -p "$1"/{etc,proc,sys,dev,tmp,run,home,root}
  while read -r folder; do mkdir -p "$1$folder"; done < <(folders && echo "$ROOT")
  for folder in bin lib lib64 sbin; do ln -s "usr/$folder" "$1/$folder"; done
  touch "$1"/etc/{hosts,resolv.conf}
  cp /etc/passwd /etc/group "$1/etc/"
  cp -r /etc/python3* "$1/etc/" 2>/dev/null || true # Debian's standard library has a link to it
  echo 'PRETTY_NAME="launch kit"' >"$1/etc/os-release"
}

use_charliecloud() {
  type -P ch-run >/dev/null || skip "there is no ch-run; sudo apt install charliecloud"
  export CONTAINER=$IMAGE CONTAINER_ARGS
  CONTAINER_ARGS=$(folders | sed 's/^/--bind=/' | tr '\n' ' ')
}

# Sets up podman with a store in the test's folder, and with limits that need no extra permission.
use_podman() {
  type -P podman >/dev/null || skip "there is no podman; sudo apt install podman runc"
  printf '[storage]\ndriver = "vfs"\ngraphroot = "%s"\nrunroot = "%s"\n' "$PWD/store" "$PWD/run" >storage.conf
  printf '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n[engine]\nruntime = "runc"\ntmp_dir = "%s"\n' \
    "$PWD/libpod" >containers.conf
  export CONTAINERS_STORAGE_CONF=$PWD/storage.conf CONTAINERS_CONF=$PWD/containers.conf
  tar -C "$IMAGE" -c . | podman import --quiet - launch-kit-test >/dev/null
  podman run --rm launch-kit-test /none 2>why || true
  grep -q '"/none"' why || skip "podman cannot run containers here: $(tail -n 1 why)"
  export CONTAINER=podman:localhost/launch-kit-test CONTAINER_ARGS
  CONTAINER_ARGS=$(folders | sed 's/.*/--volume=&:&/' | tr '\n' ' ')
}

weights_of() { # <run id>
  (cd -- "$ROOT" && "$PYTHON" -m distributed.checkpoint hash "$OLDPWD/checkpoints/$1")
}

# Checks that a run ended with the weights of a run without a container.
assert_same_weights() { # <run id>
  RUN_ID=bare CONTAINER='' scripts/ssh/launch_singlenode.sh config/local3.yaml 2 "${SMALL[@]}"
  [[ $(weights_of "$1") == "$(weights_of bare)" ]]
}

assert_inside() {
  echo 'print(open("/etc/os-release").read())' >where.py
  [[ $(TRAIN_SCRIPT=where.py scripts/ssh/launch_singlenode.sh - 1) == *'"launch kit"'* ]]
}

# Starts a long run on this machine, and returns once its ranks have taken a step.
start_long() { # <run id>
  RUN_ID=$1 setsid scripts/ssh/launch_singlenode.sh config/local3.yaml 2 "${LONG[@]}" >"$1.out" 2>&1 3>&- &
  PID=$!
  eventually grep -q '^step ' "$1.out" || { cat "$1.out" && false; }
}

# Trains and stops on this machine; also runs commands that need the project's folder.
assert_trains_and_stops() {
  assert_inside
  RUN_ID=box-inside scripts/ssh/launch_singlenode.sh config/local3.yaml 2 "${SMALL[@]}"
  assert_same_weights box-inside
  scripts/test_distributed.sh 2 --test basic # no speeds: other tests run at the same time
  scripts/cluster_train.sh config/local3.yaml "${SMALL[@]}"
  start_long box-stopped
  kill -TERM "$PID"
  end_of "$PID"
  cat box-stopped.out
  ((CODE == 75))
  eventually no_ranks box-stopped
}

# No other test may use this run id, because other tests may run on this machine at the same time.
ranks_of() { # <run id>
  pgrep -f "agent.py .*--rdzv-id $1 "
}

no_ranks() { # <run id>
  ! ranks_of "$1"
}

# bats test_tags=prove,long
@test "Charliecloud: trains inside; kill -9 leaves nothing; a stop saves; it resumes" {
  use_charliecloud
  assert_trains_and_stops
  start_long box-killed
  kill -KILL "$PID"
  eventually no_ranks box-killed
  bash -c "$(sed -n 's/^resume  *//p' box-stopped.out | tail -n 1) train.max_seconds=1" >again.out 2>&1 || (($? == 75)) || { cat again.out && false; }
  grep -q '^resumed ' again.out || { cat again.out && false; }
}

# bats test_tags=prove,long
@test "Charliecloud over ssh and pdsh: each node runs inside the container" {
  use_charliecloud
  local script
  for script in torchrun_auto pdsh_multinode; do
    RUN_ID=$script on login "scripts/ssh/launch_$script.sh" config/local3.yaml 1 node1 node2 "${SMALL[@]}"
    assert_same_weights "$script"
    rm -r checkpoints/bare
  done
}

# bats test_tags=prove,long
@test "Charliecloud under SLURM: trains inside; a notice saves, requeues and resumes" {
  use_charliecloud
  JOB=$(on login sbatch --parsable --output=job.out --nodes=2 --gpus-per-node=1 scripts/slurm/slurm_train.sh config/local3.yaml "${LONG[@]}")
  eventually grep -q '^step ' job.out || { cat job.out && false; }
  grep -q "^container  $IMAGE (charliecloud)$" job.out
  on login scancel --signal=USR1 --batch "$JOB"
  eventually is_running "$JOB" 1
  eventually grep -q 'resum' job.out || { cat job.out && false; }
  on login scancel "$JOB"
  eventually has_ended "$JOB"
  eventually is_gone_from node1 "far_side .*--rdzv-id $JOB "
}

# bats test_tags=prove,long
@test "podman: trains inside; a stop saves; kill -9 of podman itself leaves nothing" {
  use_podman
  assert_trains_and_stops
  start_long box-killed
  kill -KILL "$PID"
  eventually no_ranks box-killed
}

# Makes an environment whose Python is a script that runs the real one.
make_environment() {
  mkdir -p env/bin env/packages
  # shellcheck disable=SC2016 # expanded by the script
  printf '#!/bin/bash\n[[ $1 != -I ]] || exec printf "%%s\\n" %q /usr %q %q\nPYTHON_IS=$0 exec %q "$@"\n' \
    "$PWD/env" "$PWD/env/packages" "$PWD/env/packages" "$PYTHON" >env/bin/python
  chmod +x env/bin/python
  echo 'import os; print(os.getpid(), "from", os.environ["PYTHON_IS"], flush=True)' >where.py
  export PYTHON=$PWD/env/bin/python TRAIN_SCRIPT=$PWD/where.py SHOW_RANKS=all
  PYTHON=$(on login scripts/stage_env.sh)
}

# The last run had this many ranks, all from a copy of the environment; each node has one copy.
assert_from_copies() { # <ranks>
  cat out
  [[ $(grep -c 'from /dev/shm/launch-kit-[0-9]*/.*/env/bin/python$' out) == "$1" ]]
  local node
  for node in node1 node2; do
    [[ $(on "$node" find /dev/shm/launch-kit-"$UID" -mindepth 1 -maxdepth 1 -type d | wc -l) == 1 ]]
  done
  on login test ! -e /dev/shm/launch-kit-"$UID" # login has no ranks
}

# bats test_tags=prove,long
@test "a Python of stage_env.sh over ssh, through pdsh and under SLURM: each node runs its own copy" {
  make_environment
  local script
  for script in torchrun_auto pdsh_multinode; do
    on login "scripts/ssh/launch_$script.sh" - 2 node1 node2 >out 2>&1
    assert_from_copies 4
  done
  on login salloc --quiet --nodes=2 --ntasks-per-node=2 scripts/slurm/slurm_train.sh - >out 2>&1
  assert_from_copies 4
  LAUNCHER=srun on login salloc --quiet --nodes=2 --ntasks-per-node=2 scripts/slurm/slurm_train.sh - >out 2>&1
  assert_from_copies 4
}
