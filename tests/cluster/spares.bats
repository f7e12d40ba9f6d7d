#!/usr/bin/env bats
# Nodes lost during a run over ssh: a spare replaces them, or the run continues with fewer.
# shellcheck disable=SC2030,SC2031 # each test is a subshell, and is meant to be
# bats file_tags=prove,long
bats_require_minimum_version 1.5.0
load helper

ROOT=$(cd -- "$BATS_TEST_DIRNAME/../.." && pwd -P)
LAUNCH=scripts/ssh/launch_torchrun_auto.sh
SETTINGS=(train.max_steps=150 train.log_every=1 train.eval_every=0 train.global_batch_size=24)
SETTINGS+=(model.layers=1 model.width=16 checkpoint.every=20)
NODES=(node1 node2 node3 node4 node5)

setup_file() {
  cluster_up 5
}

teardown_file() {
  cluster_down
}

setup() {
  cd -- "$BATS_TEST_TMPDIR" || return
  ln -s -- "$ROOT"/{config,scripts} .
  mkdir tmp
  export OMP_NUM_THREADS=1 TMPDIR=$PWD/tmp MAX_RESTARTS=2
}

launch() { # <argument...>
  timeout 600 "$CLUSTER" run login "$LAUNCH" "$@"
}

weights_of() { # <run id>
  PYTHONPATH=$ROOT "$PYTHON" -m distributed.checkpoint hash "checkpoints/$1"
}

# Starts a run in the background, and waits until it has saved.
start() { # <run id> <the launcher's arguments...>
  RUN_ID=$1 launch "${@:2}" >"$1.out" 2>&1 3>&- &
  PID=$!
  eventually has_step "$1" 30 || { cat "$1.out" && false; }
}

has_step() { # <run id> <step>
  (($(wc -l <"logs/$1/metrics.jsonl") >= $2))
}

lose() { # <kill|cut|stop> <host> <run id>: kills its agent, cuts its link, stops its processes
  case $1 in
    kill) on "$2" kill -KILL "$(on "$2" pgrep -P "$(on "$2" pgrep -o -f "rdzv-id $3 ")")" ;;
    cut) "$CLUSTER" cut "$2" ;;
    stop) on "$2" bash -c 'kill -STOP -1' ;;
  esac
}

bring_back() { # <kill|cut|stop> <host>
  case $1 in
    kill) ;;
    cut) "$CLUSTER" restore "$2" ;;
    stop) on "$2" bash -c 'kill -CONT -1' ;;
  esac
}

is_gone() { # <run id>
  local node
  for node in "${NODES[@]}"; do
    ! on "$node" pgrep -f "rdzv-id $1 " || return
  done
}

# Prints the milliseconds from the detection of the latest loss to the first step after it.
pause_of() { # <run id>
  "$PYTHON" - "logs/$1" <<'PY'
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
lost = json.loads((folder / "run.json").read_text())["restarts"][-1]["failed"]
times = [json.loads(line)["time"] for line in (folder / "metrics.jsonl").open()]
print(round(1000 * (min(time for time in times if time > lost) - lost)))
PY
}

committed() { # <run id>
  (cd "checkpoints/$1" && find . -printf '%p %T@ %l\n' | sort)
}

# Loses a node of a run on 4 nodes and a spare; adds to TOOK the milliseconds to the next step.
lose_one() { # <kill|cut|stop> <node rank> <run id> <setting...>
  local host=${NODES[$2]} before
  start "$3" config/local3.yaml 1 "${NODES[@]}" "${SETTINGS[@]}" "${@:4}"
  lose "$1" "$host" "$3"
  end_of "$PID"
  before=$(committed "$3")
  bring_back "$1" "$host"
  eventually is_gone "$3" || { cat "$3.out" && false; }
  cat "$3.out"
  ((CODE == 0))
  grep -q "restart 1 of 2 after node agent $2 ($host): .*; node5 replaces $host" "$3.out"
  [[ $(committed "$3") == "$before" ]]
  [[ $(weights_of "$3") == "$NEVER" ]]
  TOOK+=("$(pause_of "$3")")
  echo "$1 of node rank $2: the next step ${TOOK[-1]} ms after the notice"
  ((TOOK[-1] <= 5000))
}

@test "a spare replaces a node that is cut off or stopped, or whose agent is killed" {
  local kinds=(kill cut stop) times=$((${TIMES:-1} * 5 / 2)) number TOOK=() NEVER
  ((times >= 3)) || times=3
  MAX_RESTARTS=0 RUN_ID=never launch config/local3.yaml 1 "${NODES[@]::4}" "${SETTINGS[@]}"
  NEVER=$(weights_of never)
  export SPARES=1
  for ((number = 0; number < times; number++)); do
    lose_one "${kinds[number % 3]}" $(((number % 3 + number / 3) % 4)) "lost-$number"
  done
  echo "# a node was lost $times times: a spare replaced it within $(printf '%s\n' "${TOOK[@]}" | sort -n | tail -n 1) ms of the notice; weights equal, no process left" >&3
}

@test "a spare gets the parts of a sharded snapshot that the lost node held" {
  local settings=(distributed.strategy=fsdp checkpoint.format=sharded checkpoint.every=0) TOOK=() NEVER
  MAX_RESTARTS=0 RUN_ID=never launch config/local3.yaml 1 "${NODES[@]::4}" "${SETTINGS[@]}" "${settings[@]}"
  NEVER=$(weights_of never)
  export SPARES=1
  lose_one kill 0 parts-0 "${settings[@]}" checkpoint.snapshot_every=5
  grep -q 'resumed    after step [0-9]*, from memory' parts-0.out
  lose_one cut 2 parts-2 "${settings[@]}" checkpoint.snapshot_every=5
  grep -q 'resumed    after step [0-9]*, from memory' parts-2.out
}

@test "when node rank 0 is lost, the copy of its snapshot is not" {
  export SPARES=1
  start copied config/local3.yaml 1 node1 node2 node3 "${SETTINGS[@]/150/500}" checkpoint.every=0 checkpoint.snapshot_every=5
  eventually has_step copied 300
  lose kill node1 copied
  end_of "$PID"
  cat copied.out
  ((CODE == 0))
  grep -q '^.1. node agent: step [0-9]* was only in memory; it is now saved in ' copied.out
  grep -q '^.2. resumed    after step [0-9]*$' copied.out
}

@test "MIN_NODES: without a spare, fewer nodes continue with the same batches" {
  export MIN_NODES=2
  start fewer config/local3.yaml 1 node1 node2 node3 "${SETTINGS[@]}"
  lose kill node1 fewer # node rank 0
  end_of "$PID"
  cat fewer.out
  ((CODE == 0))
  grep -q 'restart 1 of 2 after node agent 0 (node1): .*; continuing on 2 nodes, without node1' fewer.out
  grep -q 'with 2 processes (was 3): sums are rounded differently' fewer.out
  run ! grep -q 'batches of' fewer.out
  eventually is_gone fewer
}

@test "a spare replaces a node that cannot be reached before the start" {
  export SPARES=1
  "$CLUSTER" cut node1
  RUN_ID=swapped launch config/local3.yaml 1 node1 node2 node3 "${SETTINGS[@]/150/5}" >swapped.out 2>&1
  "$CLUSTER" restore node1
  cat swapped.out
  grep -q '^launch_torchrun_auto.sh: node3 replaces node1$' swapped.out
  grep -q '^hosts      node3 (master, 10.0.0.3:[0-9]*)  node2$' swapped.out
  grep -q '^ended      code 0; nothing is left running on 2 nodes' swapped.out
}

@test "in a SLURM job a spare replaces a node that is killed or cut off" {
  local id
  export SPARES=1
  for id in kill cut; do
    timeout 600 "$CLUSTER" run login salloc --quiet --no-kill --nodes=4 --ntasks-per-node=1 --nodelist=node[1-4] \
      env RUN_ID="$id" scripts/run_ddp.sh -n 1 -c config/local3.yaml -- "${SETTINGS[@]}" >"$id.out" 2>&1 3>&- &
    PID=$!
    eventually has_step "$id" 30 || { cat "$id.out" && false; }
    lose "$id" node2 "$id"
    end_of "$PID"
    bring_back "$id" node2
    cat "$id.out"
    ((CODE == 0))
    grep -q "restart 1 of 2 after node agent 1 (node2): .*; node4 replaces node2" "$id.out"
    eventually is_gone "$id"
    (($(pause_of "$id") <= 5000))
  done
}

@test "in a SLURM job a spare replaces a node that does not answer before the start" {
  export SPARES=1
  mkfifo go
  "$CLUSTER" run login salloc --quiet --no-kill --nodes=3 --ntasks-per-node=1 --nodelist=node[1-3] \
    bash -c 'touch allocated; read -r <go; RUN_ID=ill "$@"' _ \
    scripts/run_ddp.sh -n 1 -c config/local3.yaml -- "${SETTINGS[@]/150/5}" >ill.out 2>&1 3>&- &
  PID=$!
  eventually test -e allocated
  "$CLUSTER" cut node1
  echo >go
  end_of "$PID"
  "$CLUSTER" restore node1
  cat ill.out
  grep -q "^run_ddp.sh: node3 replaces node1$" ill.out
  grep -q '^hosts      node2:[0-9]* (master)  node2,node3$' ill.out
  grep -q '^done       step 5 ' ill.out
}

@test "after a cut without a restart, a remaining agent saves the snapshot" {
  local host
  for host in node2 node1; do
    MAX_RESTARTS=0 SILENCE_SECONDS=10 start "$host" config/local3.yaml 1 node1 node2 node3 "${SETTINGS[@]/150/100000}" checkpoint.every=0 checkpoint.snapshot_every=5
    eventually has_step "$host" 300
    on "$host" mount --bind checkpoints checkpoints
    on "$host" mount -o remount,ro,bind checkpoints # a cut node also loses the shared disk
    "$CLUSTER" cut "$host"
    end_of "$PID"
    "$CLUSTER" restore "$host"
    on "$host" umount --lazy checkpoints
    cat "$host.out"
    ((CODE == 137))
    grep -q 'node agent: step [0-9]* was only in memory; it is now saved in ' "$host.out"
    weights_of "$host"
  done
}

@test "with no spare left, the run ends and names the node" {
  export SPARES=1 MAX_RESTARTS=2
  start ends config/local3.yaml 1 node1 node2 node3 "${SETTINGS[@]/600/100000}"
  lose kill node3 ends # the spare
  eventually grep -q 'warning: spare node3: its node agent is gone; the run continues' ends.out
  lose kill node2 ends
  end_of "$PID"
  cat ends.out
  ((CODE == 137))
  grep -q '^.0. node agent: not restarting: no spare is left for node2' ends.out
  grep -q '^FAILED   node agent 1 (node2) .*\[agent-killed\]$' ends.out
  eventually is_gone ends
}

@test "a stop also reaches the spare; without a loss a run ends as usual" {
  export SPARES=1
  start stopped config/local3.yaml 1 node1 node2 node3 "${SETTINGS[@]/600/100000}"
  on login kill -TERM "$(launcher_pid stopped)"
  end_of "$PID"
  cat stopped.out
  ((CODE == 75))
  grep -q '^ended      code 75; nothing is left running on 3 nodes' stopped.out
  is_gone stopped
}
