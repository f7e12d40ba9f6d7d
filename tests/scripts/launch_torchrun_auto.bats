#!/usr/bin/env bats
# shellcheck disable=SC2030,SC2031 # each test is a subshell, and is meant to be
bats_require_minimum_version 1.5.0
load helper

launch() {
  "$ROOT/scripts/ssh/launch_torchrun_auto.sh" "$@"
}

# The nodes that --dry-run shows, with their ranks.
nodes_of() { # <argument...>
  launch plain.yaml "$@" train.batch_size=1 --dry-run 2>/dev/null | sed -n 's/^# node [0-9]* (\(.*\)): ranks \([0-9-]*\) .*/\1 \2/p' | paste -sd,
}

@test "--dry-run: the plan and the golden command of each node" {
  export RUN_ID=golden MASTER_PORT=23456 OMP_NUM_THREADS=1 SSH_OPTS=-6
  unset LD_LIBRARY_PATH # the plan would say that it is not sent
  run --separate-stderr launch plain.yaml 2 node1 me@node2:4 --dry-run
  local line="MASTER_PORT=23456 SSH_OPTS=-6 OMP_NUM_THREADS=1 $ROOT/scripts/ssh/launch_torchrun_auto.sh plain.yaml 2 node1 me@node2:4"
  assert_output "# node 0 (node1): ranks 0-1 of 6, rendezvous node1:23456
ssh -t -6 -- node1 \"$(golden_command "$line" 2 0 2 node1 "$ROOT/train.py --config plain.yaml")\"
# node 1 (me@node2): ranks 2-5 of 6, rendezvous node1:23456
ssh -t -6 -- me@node2 \"$(golden_command "$line" 2 1 4 node1 "$ROOT/train.py --config plain.yaml")\""
  # shellcheck disable=SC2154 # set by run
  [[ $stderr == "run        golden    plain.yaml
hosts      node1 (master, node1:23456)  me@node2
ranks      6 = 2 nodes x 2,4, gloo
batch      6 samples a step = 6 ranks x 1
variables  sent to the nodes: OMP_NUM_THREADS
preflight  not run (--dry-run)
logs       logs/golden/   (tail -f logs/node_*.log)" ]]
}

@test "SPARES: the last nodes wait, in the plan and in the golden command" {
  export RUN_ID=golden MASTER_PORT=23456 SPARES=1 MIN_NODES=1 MAX_RESTARTS=3
  run --separate-stderr launch plain.yaml 2 node1 node2 --dry-run train.batch_size=1
  [[ $status == 0 && ${#lines[@]} == 4 ]]
  [[ ${lines[0]} == "# node 0 (node1): ranks 0-1 of 2, rendezvous node1:23456" ]]
  [[ ${lines[2]} == "# node 1 (node2): a spare, rendezvous node1:23456" ]]
  [[ ${lines[3]} == *" SPARES=1 MIN_NODES=1 "*" --nnodes 1 --node-rank 1 --master-addr node1 --nproc-per-node 2 "* ]]
  # shellcheck disable=SC2154 # set by run
  [[ $stderr == *$'\n'"hosts      node1 (master, node1:23456)"$'\n'"spares     node2"$'\n'"ranks      2 = 1 node x 2, gloo"$'\n'* ]]
  SPARES=2 run launch plain.yaml 2 node1 node2 train.batch_size=1
  assert_refused 2 "SPARES is 2, but there are only 2 nodes; name more nodes (the last ones are the spares)"
}

@test "TRAIN_SCRIPT: a module, over ssh" {
  TRAIN_SCRIPT="-m pkg.mod" run --separate-stderr launch plain.yaml 2 node1 --dry-run -- x
  [[ $status == 0 && $output == *" -m pkg.mod --config plain.yaml x"* ]]
}

# bats test_tags=slow
@test "nodes: lists, addresses, numbers, files" {
  printf '%s\n' '# ours' 'a slots=3 # new' '' $'b:1\r' 'c[1-2] ' 'e max_slots=4 slots=2' >hosts
  printf 'd' >>hosts
  [[ $(nodes_of 2 'gpu[01-03],login' me@n[1-2]:1) == "gpu01 0-1,gpu02 2-3,gpu03 4-5,login 6-7,me@n1 8-8,me@n2 9-9" ]]
  [[ $(nodes_of 2 fd00::1 '[fd00::2]:3' 'me@[fd00::3]' 10.0.0.1:1) == "fd00::1 0-1,fd00::2 2-4,me@fd00::3 5-6,10.0.0.1 7-7" ]]
  [[ $(nodes_of 2 -f hosts) == "a 0-2,b 3-3,c1 4-5,c2 6-7,e 8-9,d 10-11" ]]
  printf '%s\n' 'a 4 all.q@a UNDEFINED' 'b.site 2 all.q@b.site <NULL>' >pe_hostfile # of Grid Engine
  [[ $(nodes_of 2 -f pe_hostfile) == "a 0-3,b.site 4-5" ]]
  echo "a b" >hosts
  run launch plain.yaml 2 -f hosts
  assert_refused 2 "line 1 of 'hosts' is 'a b'; give NODE, NODE:NPROC or NODE slots=NPROC, one per line"
  echo "# a" >hosts
  run launch plain.yaml 2 -f hosts
  assert_refused 2 "'hosts' lists no nodes; add one per line"
}

@test "no ssh: exit 3, one line" {
  local PATH=$PATH
  bare_path
  run launch plain.yaml 1 node1
  assert_refused 3 "ssh is not installed here; install OpenSSH's client" "env-missing"
}

# bats test_tags=slow
@test "the variables sent to the nodes are named, and no value is shown" {
  export NCCL_DEBUG=WARN WANDB_API_KEY=hush OTHER=hush MINE=hush FORWARD_ENV=MINE
  run launch plain.yaml 1 node1 --dry-run
  [[ $output == *"variables  sent to the nodes: MINE "*" WANDB_API_KEY"* && $output == *NCCL_DEBUG* ]]
  [[ $output != *hush* && $output != *OTHER* ]]
  module() { export TOOLKIT=hush; }
  export -f module
  MODULES=tools run launch plain.yaml 1 node1 --dry-run
  [[ $output == *"variables  sent to the nodes: "*" TOOLKIT "* && $output != *hush* ]]
}

@test "bad arguments: exit 2, one line" {
  local cause arguments
  while IFS='|' read -r arguments cause; do
    read -ra arguments <<<"$arguments"
    run launch plain.yaml "${arguments[@]}"
    assert_refused 2 "$cause"
  done <<'TABLE'
|no nodes; name them after NPROC, or in a file with -f
2|no nodes; name them
node1 node2|the number of processes is 'node1'
2 node1:x|the number of processes for 'node1:x' is 'x'
2 node1:|the number of processes for 'node1:' is ''
2 :3|':3' is not a node
2 node1:2222|'node1:2222' asks for 2222 processes on node1; if that is ssh's port, set it in ~/.ssh/config, or with SSH_OPTS='-p 2222'
2 me@node1:22|'me@node1:22' asks for 22 processes on me@node1; if that is ssh's port,
2 gpu[3-1]|the range '3-1' is reversed
2 -f none|there is no host file 'none'
2 node1 -f|option -f needs a value
2 node1 --nodes=3|unknown option '--nodes'
TABLE
  NCCL_PROFILE=fast run launch plain.yaml 1 node1 node2
  assert_refused 2 "NCCL_PROFILE is 'fast'; choose from infiniband, ethernet, none"
  FORWARD_ENV=HOME,NONE run launch plain.yaml 1 node1 node2
  assert_refused 2 "FORWARD_ENV names 'NONE', which is not in the environment; export it, or omit it"
}
