#!/usr/bin/env bats
bats_require_minimum_version 1.5.0
load helper

launch() {
  "$ROOT/scripts/cluster_train.sh" "$@"
}

# The variables that srun sets in a step, for node 1 of node[1-2].
export_step() {
  export SLURM_JOB_ID=9 SLURM_JOB_NUM_NODES=3 SLURM_STEP_ID=0 SLURM_NODEID=1 SLURM_PROCID=1 SLURM_LOCALID=0 \
    SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST='node[1-2]' SLURM_STEP_TASKS_PER_NODE='1(x2)'
}

@test "--dry-run: the golden command" {
  export RUN_ID=golden
  run --separate-stderr launch plain.yaml 2 1 10.0.0.1 23456 --dry-run
  [[ $status == 0 ]]
  assert_output "# node 1 ($HOST): ranks 1-1 of 2, rendezvous 10.0.0.1:23456
$(golden_command "$ROOT/scripts/cluster_train.sh plain.yaml 2 1 10.0.0.1 23456" \
    2 1 1 10.0.0.1 "$ROOT/train.py --config plain.yaml")"
  [[ ! -e logs ]]
}

# bats test_tags=slow
@test "under srun: nodes, rank and master from the step, the port from the job" {
  export_step
  run --separate-stderr launch plain.yaml --dry-run
  [[ $status == 0 ]]
  local port
  port=$(cd "$ROOT" && "$PYTHON" -c 'import distributed.environment as e; print(e.port_from_id("9"))')
  [[ $output == *" --nnodes 2 --node-rank 1 --master-addr node1 --nproc-per-node 1 --master-port $port "* ]]
  # shellcheck disable=SC2154 # set by run
  [[ $output != *" --rdzv-id "* && $stderr == *$'\nrun        (named by node rank 0) '* ]]
  SLURM_NODEID=0 SLURM_PROCID=0 run --separate-stderr launch plain.yaml --dry-run
  [[ $output == *" --node-rank 0 "*" --rdzv-id 9 "* ]]
  run --separate-stderr launch plain.yaml 2 1 --dry-run
  [[ $status == 0 && $output == *" --node-rank 1 "* ]]
}

# bats test_tags=slow
@test "health checks, then the run; the log keeps what the terminal shows" {
  echo 'print("trained", flush=True)' >own.py
  TRAIN_SCRIPT=own.py NPROC_PER_NODE=2 run launch -
  [[ $status == 0 ]]
  [[ $output == *"preflight  23 checks"*"health     this node alone, 2 processes: ok"*trained* ]]
  [[ $output == "$(<logs/distributed_training/latest_node0.log)" ]]
  [[ $(readlink logs/distributed_training/latest_node0.log) == cluster_train_*_node0.log ]]
}

# bats test_tags=slow,long
@test "two nodes by hand on this machine; the log of the second shows its wait, progress and end" {
  cat >own.py <<'PY'
import os, torch, torch.distributed as d
d.init_process_group("gloo")
print("met", d.get_world_size(), flush=True)
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
while not os.path.exists("told"):
    optimizer.step()
d.barrier()
PY
  export TRAIN_SCRIPT=own.py
  local port log=logs/distributed_training/latest_node1.log
  port=$("$PYTHON" -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')
  launch - 2 1 127.0.0.1 "$port" >node1.out 2>&1 3>&- &
  (
    until grep -q '^node agent: step [1-9]' "$log" || [[ -e over ]]; do sleep 0.1; done
    touch told
  ) 2>/dev/null 3>&- &
  run launch - 2 0 127.0.0.1 "$port"
  touch over
  wait
  [[ $status == 0 && $output == *"met 2"* ]]
  grep -q "checked in with node rank 0 on .* (127.0.0.1:$port)" "$log"
  [[ $(tail -n 1 "$log") == "node agent: the run has ended with code 0" ]]
}

# bats test_tags=slow,long
@test "the exit code is the rank's, even though the output is copied to the log" {
  echo 'raise SystemExit(7)' >own.py
  TRAIN_SCRIPT=own.py SKIP_PREFLIGHT=1 run launch -
  [[ $status == 7 ]]
}

# bats test_tags=slow,long
@test "arguments arrive byte for byte" {
  make_dump
  make_config "$ODD_CONFIG"
  SKIP_PREFLIGHT=1 launch "$ODD_CONFIG" "${ODD_SETTINGS[@]}" -- "${ODD_REST[@]}"
  assert_odd_dumped
}

# bats test_tags=slow
@test "bad arguments: exit 2, one line" {
  run launch plain.yaml 2 1
  assert_refused 2 "2 nodes, but no MASTER_ADDR; give the address of node rank 0"
  run launch plain.yaml 2 5 10.0.0.1
  assert_refused 2 "the node rank is '5'"
  run launch plain.yaml 1 0 10.0.0.1 abc
  assert_refused 2 "the port is 'abc'"
  run launch plain.yaml --nodes 2
  assert_refused 2 "unknown option '--nodes'"
}
