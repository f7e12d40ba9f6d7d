#!/usr/bin/env bats
bats_require_minimum_version 1.5.0
load helper

launch() {
  "$ROOT/scripts/ssh/launch_torchrun_multinode.sh" "$@"
}

@test "--dry-run: the golden command of each node rank" {
  export RUN_ID=golden
  local line="$ROOT/scripts/ssh/launch_torchrun_multinode.sh plain.yaml 4 2"
  run --separate-stderr launch plain.yaml 4 2 0 10.0.0.1 23456 --dry-run
  [[ $status == 0 ]]
  assert_output "# node 0 ($HOST): ranks 0-3 of 8, rendezvous 10.0.0.1:23456
$(golden_command "$line 0 10.0.0.1 23456" 2 0 4 10.0.0.1 "$ROOT/train.py --config plain.yaml")"
  run --separate-stderr launch plain.yaml 4 2 1 10.0.0.1 23456 --dry-run
  assert_output "# node 1 ($HOST): ranks 4-7 of 8, rendezvous 10.0.0.1:23456
$(golden_command "$line 1 10.0.0.1 23456" 2 1 4 10.0.0.1 "$ROOT/train.py --config plain.yaml")"
  # shellcheck disable=SC2154 # set by run
  [[ $stderr == *"ranks      8 = 2 nodes x 4, gloo"* ]]
}

# bats test_tags=slow
@test "the port is 29500 by default; node rank 0 chooses the run id" {
  run launch plain.yaml 1 2 0 10.0.0.1 --dry-run
  [[ $output == *"--master-port 29500 "* && $output == *" --rdzv-id "* ]]
  MASTER_PORT=4000 run launch plain.yaml 1 2 1 10.0.0.1 --dry-run
  [[ $output == *"--master-port 4000 "* && $output != *" --rdzv-id "* ]]
  [[ $output == *"run        (named by node rank 0)"* ]]
}

# bats test_tags=slow,long
@test "two node ranks of this machine train together" {
  cat >own.py <<'PY'
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(total)
print("sum", int(total), "of", dist.get_world_size(), flush=True)
dist.destroy_process_group()
PY
  export TRAIN_SCRIPT=own.py
  local port
  port=$("$PYTHON" -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')
  launch - 2 2 1 127.0.0.1 "$port" >node1.out 2>&1 3>&- &
  run --separate-stderr launch - 2 2 0 127.0.0.1 "$port"
  wait $!
  [[ $status == 0 && $output == "sum 6 of 4" ]]
  grep -q '^\[3\] sum 6 of 4' logs/node_1.log
}

# bats test_tags=slow,long
@test "arguments arrive byte for byte" {
  make_dump
  make_config "$ODD_CONFIG"
  launch "$ODD_CONFIG" 1 1 0 127.0.0.1 "${ODD_SETTINGS[@]}" -- "${ODD_REST[@]}"
  assert_odd_dumped
}

@test "bad arguments: exit 2, one line" {
  run launch plain.yaml 2 2 0
  assert_refused 2 "too few arguments; usage: "
  run launch plain.yaml 2 2 2 10.0.0.1
  assert_refused 2 "the node rank is '2'; give a whole number from 0 to 1"
  run launch plain.yaml 2 two 0 10.0.0.1
  assert_refused 2 "the number of nodes is 'two'"
  run launch plain.yaml 2 2 0 10.0.0.1 port
  assert_refused 2 "the port is 'port'"
  run launch plain.yaml 2 2 0 10.0.0.1 29500 more
  assert_refused 2 "unexpected argument"
  run launch plain.yaml 2 2 0 10.0.0.1 --nnodes=2
  assert_refused 2 "unknown option '--nnodes'"
}

# bats test_tags=slow
@test "an impossible master: exit 3, one line" {
  run launch plain.yaml 2 2 0 no-such-host.invalid --strict
  assert_refused 3 "$HOST: the master's name 'no-such-host.invalid' is unknown" "name-unresolved"
  run launch plain.yaml 2 2 0 127.9.9.9
  assert_refused 3 "$HOST: the master 127.9.9.9 is a loopback address" "loopback-address"
}
