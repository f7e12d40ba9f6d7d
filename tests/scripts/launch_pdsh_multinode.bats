#!/usr/bin/env bats
bats_require_minimum_version 1.5.0
load helper

launch() {
  "$ROOT/scripts/ssh/launch_pdsh_multinode.sh" "$@"
}

@test "--dry-run: each node's command through pdsh, with every % doubled" {
  export TRAIN_SCRIPT=own.py
  run --separate-stderr launch - 2 "node[1-2]" --dry-run -- 100%h
  [[ $status == 0 && ${#lines[@]} == 4 && ${lines[0]} == "# node 0 (node1): ranks 0-1 of 4, "* ]]
  mapfile -t words < <(xargs printf '%s\n' <<<"${lines[3]}")
  [[ ${words[*]:0:7} == "PDSH_SSH_ARGS_APPEND=-tt pdsh -R ssh -S -w node2" && ${words[7]} == *" --node-rank 1 "*" own.py 100%%h" ]]
}

@test "TRAIN_SCRIPT: a module, through pdsh" {
  TRAIN_SCRIPT="-m pkg.mod" run --separate-stderr launch plain.yaml 2 node1 --dry-run -- x
  [[ $status == 0 && $output == *" -m pkg.mod --config plain.yaml x"* ]]
}

@test "no pdsh: exit 3, one line" {
  local PATH=$PATH
  bare_path
  run launch plain.yaml 2 node1
  assert_refused 3 "pdsh is not installed here; install it, or use" env-missing
}
