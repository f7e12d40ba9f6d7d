#!/usr/bin/env bats
bats_require_minimum_version 1.5.0
load helper

launch() {
  "$ROOT/scripts/ssh/launch_multinode.sh" "$@"
}

# bats test_tags=slow
@test "--dry-run: torch.distributed.launch below the supervisor, with its own arguments alone" {
  export RUN_ID=golden MASTER_PORT=23456
  local each words
  for each in "" --use-env; do
    run --separate-stderr launch plain.yaml 2 node1 node2 $each --dry-run
    [[ $status == 0 && ${#lines[@]} == 4 ]]
    mapfile -t words < <(xargs printf '%s\n' <<<"${lines[3]}")
    [[ ${words[*]:0:4} == "ssh -t -- node2" && ${words[4]} == *" ENGINE=torch.distributed.launch "* ]]
    [[ ${words[4]} == *"/agent.py --nnodes 2 --node-rank 1 --master-addr node1 --nproc-per-node 2 --master-port 23456 ${each:+$each }$ROOT/train.py --config plain.yaml" ]]
  done
}

# bats test_tags=slow
@test "TRAIN_SCRIPT: a module, in torch.distributed.launch's own ranks" {
  make_module
  # shellcheck disable=SC2016 # must not be expanded
  run --separate-stderr launch - 1 node1 --dry-run --use-env -- x --log '$$5'
  [[ $status == 0 ]]
  run bash -c "$(tail -n 1 <<<"$output" | xargs printf '%s\n' | tail -n 1)" # what node1 would run
  # shellcheck disable=SC2016
  [[ $status == 0 && $output == *'pkg.mod 1 of 1: x --log $$5'* ]]
}
