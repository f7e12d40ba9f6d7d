#!/usr/bin/env bats
bats_require_minimum_version 1.5.0
load helper

launch() {
  "$ROOT/scripts/test_distributed.sh" "$@"
}

@test "--dry-run: the golden command" {
  export RUN_ID=golden MASTER_PORT=23456
  run --separate-stderr launch 3 --dry-run
  [[ $status == 0 ]]
  local typed_in=$PWD golden
  cd "$ROOT"
  golden=$(golden_command "MASTER_PORT=23456 $ROOT/scripts/test_distributed.sh 3" 1 0 3 127.0.0.1 "-m distributed.selftest")
  assert_output "# node 0 ($HOST): ranks 0-2 of 3, rendezvous 127.0.0.1:23456
${golden/--log-dir logs/--log-dir $typed_in/logs}"
}

@test "two processes without a GPU, otherwise one per GPU" {
  run launch --dry-run
  [[ $output == *"2 = 1 node x 2, gloo"* ]]
  fake_gpus 3
  run launch --dry-run
  [[ $output == *"3 = 1 node x 3, nccl"* ]]
}

# bats test_tags=slow
@test "the verdict in one line; --json is relative to the current folder" {
  LOG_DIR=$PWD/logs run --separate-stderr launch 2 --test basic --json found.json
  [[ $status == 0 && ${lines[-1]} == "PASS  2 ranks on 1 node, gloo: "* ]]
  "$PYTHON" -c 'import json
found = json.load(open("found.json"))
assert found["passed"] and found["verdict"].startswith("PASS  2 ranks")
assert found["faults"] == found["exclude"] == found["links"] == []
assert [rank["local_rank"] for rank in found["ranks"]] == [0, 1]'
}

# bats test_tags=slow
@test "a fault is named in the verdict and in the failure block" {
  mkdir wrong
  echo 'import torch.distributed as d; w = d.broadcast; d.broadcast = lambda t, **o: (w(t, **o), t.add_(1))' >wrong/sitecustomize.py
  PYTHONPATH=$PWD/wrong LOG_DIR=$PWD/logs run launch 2 --test basic
  echo "$output"
  [[ $status == 1 && $output == *$'\nFAIL  2 ranks on 1 node, gloo: broadcast on rank '*"[wrong-result]"* ]]
  [[ $output == *"FAILED   rank 0 "*"[wrong-result]"*"cause    broadcast on rank "* ]]
  [[ ${lines[-1]} == "see      TROUBLESHOOTING.md#wrong-result" ]]
}

@test "the test's own options follow its name" {
  run --separate-stderr launch 2 --dry-run --quick --test basic --json "a b.json" -- --quick
  [[ $status == 0 && ${lines[-1]} == *" -m distributed.selftest --quick --test basic --json '$PWD/a b.json' --quick" ]]
}

@test "bad arguments: exit 2, one line" {
  run launch 0
  assert_refused 2 "the number of processes is '0'"
  run launch node1 node2
  assert_refused 2 "the number of processes is 'node1'"
  run launch seed=1
  assert_refused 2 "settings have no effect here"
  run launch 2 --test some
  assert_refused 2 "--test is 'some'; give basic or all"
  run launch --gpus
  assert_refused 2 "unknown option '--gpus'"
}
