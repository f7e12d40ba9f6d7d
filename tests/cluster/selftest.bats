#!/usr/bin/env bats
# The self-test on several nodes, with both scripts: it names what is slow, and on which node.
# shellcheck disable=SC2030,SC2031 # each test is a subshell, and is meant to be
bats_require_minimum_version 1.5.0
load helper

ROOT=$(cd -- "$BATS_TEST_DIRNAME/../.." && pwd -P)
USUAL=400mbit # of each node's link

setup_file() {
  local node
  cluster_up 4
  for node in node{1..4}; do "$CLUSTER" slow "$node" "$USUAL"; done
}

teardown_file() {
  cluster_down
}

setup() {
  cd -- "$BATS_TEST_TMPDIR" || return
  export OMP_NUM_THREADS=1 LOG_DIR=$PWD/logs PREFLIGHT_SECONDS=20
}

# Runs the test on all nodes; sets CODE. The output is in `out`, the findings in found.json.
try_nodes() { # <option...>
  CODE=0
  timeout 600 "$CLUSTER" run login "$ROOT/scripts/test_distributed.sh" 1 node[1-4] \
    --json found.json "$@" &>out || CODE=$?
}

found() { # <jq-like path in Python>
  "$PYTHON" -c "import json; f = json.load(open('found.json')); print($1)"
}

# Whether the test named this fault, and listed only this node as one to exclude.
names() { # <node> <fault>
  ((CODE == 1)) && grep -q "^\[0\] FAIL .*$1.*\[$2\]" out && grep -q "^FAILED .*\[$2\]$" out &&
    [[ $(found '*f["exclude"]') == "$1" ]]
}

try_slow_link() { # <node> <rate>
  "$CLUSTER" slow "$1" "$2"
  try_nodes --quick
  "$CLUSTER" slow "$1" "$USUAL"
  names "$1" slow-link || { cat out && false; }
}

try_slow_rank() { # <node> <times>
  "$CLUSTER" run "$1" "$PYTHON" "$ROOT/tests/cluster/slow_down.py" "$2" 3>&- &
  local slowing=$!
  try_nodes --quick
  kill "$slowing"
  wait "$slowing" || true
  names "$1" slow-rank || { cat out && false; }
}

try_healthy() {
  try_nodes
  if ((CODE)) || ! grep -q '^\[0\] PASS  4 ranks on 4 nodes, gloo: ' out; then cat out && false; fi
}

# bats test_tags=prove,long
@test "a slow link is named, even one that is too slow for the test itself" {
  local number rate
  for rate in 40mbit 4mbit; do
    for ((number = 0; number < ${TIMES:-1}; number++)); do
      try_slow_link "node$((number % 4 + 1))" "$rate"
    done
    echo "# one link of $rate, the others $USUAL: the node was named in $number of $number runs" >&3
  done
  try_slow_link node2 1mbit
}

# bats test_tags=prove,long
@test "a slow rank is named" {
  local number times
  for times in 3 1.5; do
    for ((number = 0; number < ${TIMES:-1}; number++)); do
      try_slow_rank "node$((number % 4 + 1))" "$times"
    done
    echo "# a rank that takes $times times as long: its node was named in $number of $number runs" >&3
  done
}

# bats test_tags=prove,long
@test "nothing is named on healthy nodes" {
  local number
  for ((number = 0; number < ${TIMES:-1}; number++)); do try_healthy; done
  echo "# 4 healthy nodes: $number of $number runs pass" >&3
}

@test "in a SLURM allocation it tests all nodes of the job" {
  run on login salloc -Q --nodes=2 "$ROOT/scripts/test_distributed.sh" 1 --test basic
  echo "$output"
  [[ $status == 0 && $output == *"PASS  2 ranks on 2 nodes, gloo: 19 checks, "* ]]
}

# bats test_tags=prove,long
@test "test_distributed_integration.sh tests the nodes together, then trains and resumes" {
  run on login "$ROOT/scripts/test_distributed_integration.sh" --quiet
  echo "$output"
  [[ $status == 0 && ${lines[-1]} == "PASS       the nodes work together; training and resuming worked" ]]
  [[ $output == *"PASS  4 ranks on 2 nodes, gloo: "* && $output == *$'\nresumed    after step 20\n'* ]]
}

@test "in a PBS job it tests all nodes of the node file" {
  printf 'node2\nnode3\n' >nodefile
  PBS_JOBID=1.pbs PBS_NODEFILE=$PWD/nodefile run on node2 "$ROOT/scripts/test_distributed.sh" 1 --test basic
  echo "$output"
  [[ $status == 0 && $output == *"PASS  2 ranks on 2 nodes, gloo: 19 checks, "* ]]
}

# bats test_tags=prove,long
@test "the links of 16 nodes take at most 4 times as long as those of 4, and none is named" {
  local nodes took median=()
  for nodes in 4 16; do
    took=()
    CLUSTER_DIR=$BATS_TEST_TMPDIR/$nodes "$CLUSTER" up "$nodes"
    for _ in 1 2 3; do
      rm -f found.json
      CLUSTER_DIR=$BATS_TEST_TMPDIR/$nodes timeout 300 "$CLUSTER" run login \
        env PREFLIGHT_SECONDS=60 "$ROOT/scripts/test_distributed.sh" 1 "node[1-$nodes]" --json found.json &>out || true
      took+=("$(found 'f["links_seconds"]')") || { cat out && false; }
      [[ $(found '[fault for fault in f["faults"] if fault.endswith("[slow-link]")]') == '[]' ]] || { cat out && false; }
    done
    CLUSTER_DIR=$BATS_TEST_TMPDIR/$nodes "$CLUSTER" down
    median+=("$(printf '%s\n' "${took[@]}" | sort -n | sed -n 2p)")
  done
  printf '# links: %.1f s on 4 nodes, %.1f s on 16 (medians of 3)\n' "${median[@]}" >&3
  "$PYTHON" -c "assert ${median[1]} <= 4 * ${median[0]}"
}
