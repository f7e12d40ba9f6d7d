#!/usr/bin/env bats
# The cluster itself, on which the tests of the launchers rely.
# shellcheck disable=SC2030,SC2031 # each test is a subshell, and is meant to be one
# bats file_tags=prove,long
bats_require_minimum_version 1.5.0
load helper

setup_file() {
  cluster_up 3
  export TIMED # for the last test, because a time limit takes at least a minute
  TIMED=$(submit --time=1 --nodelist=node1 sleep 600)
}

teardown_file() {
  cluster_down
}

# --- SLURM --------------------------------------------------------------------------------------

@test "up in less than 20 seconds, with every node in each partition" {
  ((UP_S < 20))
  run on login sinfo -h -t idle,mix -o '%P %D'
  [[ $output == $'batch* 3\nlow 3\ncheap 3\nurgent 3' ]]
}

@test "srun: each node reports its own name" {
  run on login srun -N3 hostname
  [[ $(sort <<<"$output") == $'node1\nnode2\nnode3' ]]
}

@test "sbatch: a job runs, from SLURM's own copy of the script" {
  # shellcheck disable=SC2016 # expanded in the job
  printf '#!/bin/bash\necho "$SLURM_JOB_NUM_NODES $(hostname) $0"\n' >job.sh
  on login sbatch --wait -N2 --output=job.out job.sh
  [[ $(<job.out) == "2 node1 /run/slurmd/"* ]]
}

@test "fake GPUs: as many as asked for, and no more than there are" {
  # shellcheck disable=SC2016 # expanded in the step
  run on login srun -N2 --gres=gpu:2 bash -c 'echo "$SLURM_GPUS_ON_NODE $CUDA_VISIBLE_DEVICES"'
  [[ $output == $'2 0,1\n2 0,1' ]]
  run on login srun --ntasks=2 --gpus-per-task=1 printenv CUDA_VISIBLE_DEVICES
  [[ $(sort <<<"$output") == $'0\n1' ]]
  run on login srun --gres=gpu:9 true
  [[ $status != 0 ]]
}

@test "salloc: its shell is an interactive step on the first node" {
  # shellcheck disable=SC2016 # expanded by the shell on the node
  printf '#!/bin/bash\necho "$(hostname):$SLURM_STEP_ID"\n' >shell.sh
  chmod +x shell.sh
  run on login script -qc 'SHELL=./shell.sh salloc -N2' /dev/null </dev/null
  [[ $output == *node1:4294967290* ]]
}

@test "a requeued job starts again" {
  local job
  job=$(submit sleep 600)
  on login scontrol requeue "$job"
  eventually is_running "$job" 1
  on login scancel "$job"
}

@test "a job in the partition urgent pre-empts one in batch, which starts again" {
  local job
  job=$(submit --nodelist='node[2-3]' --exclusive sleep 600)
  timeout 40 "$CLUSTER" run login srun --partition=urgent --nodelist='node[2-3]' --exclusive true
  eventually is_running "$job" 1
  on login scancel "$job"
}

# --- hosts --------------------------------------------------------------------------------------

@test "every host has its name, and knows the addresses of all" {
  local host
  for host in login node1 node2 node3; do
    [[ $(on "$host" hostname) == "$host" ]]
    run on "$host" getent hosts login node1 node3
    [[ $output == $(printf '%-15s %s\n' 10.0.0.254 login 10.0.0.1 node1 10.0.0.3 node3) ]]
  done
}

@test "a host sees its own processes only, and has its own /dev/shm" {
  "$CLUSTER" run node1 sleep 4711 &
  eventually on node1 pgrep -f '^sleep 4711'
  run on node2 pgrep -f '^sleep 4711'
  [[ $status == 1 ]]
  on node1 touch /dev/shm/node1
  [[ -z $(on node2 ls /dev/shm) && ! -e /dev/shm/node1 ]]
  kill $!
}

@test "ssh: between all hosts, also with -F; an unknown host key is refused" {
  local from to
  for from in login node1 node3; do
    for to in login node1 node2; do
      [[ $(on "$from" ssh "$to" hostname) == "$to" ]]
    done
  done
  [[ $(on login ssh -F "$CLUSTER_DIR/etc/ssh_config" 10.0.0.2 hostname) == node2 ]]
  run on login ssh -o UserKnownHostsFile=/dev/null node1 true
  [[ $status == 255 && $output == *"Host key verification failed"* ]]
}

@test "a host's home is the cluster's own, and its ssh ignores the user's settings" {
  local home=$CLUSTER_DIR/home
  # shellcheck disable=SC2016,SC2088 # expanded on login
  [[ $(on login bash -c 'echo "$HOME" ~root') == "$home $home" ]]
  # shellcheck disable=SC2016 # expanded on node1
  [[ $(on login ssh node1 'echo "$HOME $PWD"') == "$home $home" ]]
}

@test "pdsh: over ssh, with host lists" {
  run on login pdsh -R ssh -w 'node[1-3]' hostname
  [[ $(sort <<<"$output") == $'node1: node1\nnode2: node2\nnode3: node3' ]]
}

@test "run: arguments, folder, standard input and exit code are passed on" {
  # shellcheck disable=SC2016 # must not be expanded
  [[ $(on node2 printf '<%s>' 'a b' '$HOME' '' $'\n"') == '<a b><$HOME><><'$'\n"''>' ]]
  [[ $(on node2 pwd) == "$PWD" ]]
  [[ $(echo text | on node2 cat) == text ]]
  run on node2 bash -c 'exit 7'
  [[ $status == 7 ]]
  run on node2 bash -c 'kill -KILL $$'
  [[ $status == 137 ]]
  run on node9 true
  [[ $status == 3 && $output == *"no host 'node9' is up; start it with make cluster-up" ]]
}

@test "run: the caller's variables are passed on, whatever their names" {
  export HERE=1 DIR=2 HOST=3 INIT=4 signal=5
  local ours='^(SLURM_CONF|SSH_OPTS|PDSH_[A-Z_]+|PATH|HOME|SHLVL|_)='
  diff <(env | grep -vE "$ours" | sort) <(on node1 env | grep -vE "$ours" | sort)
}

@test "run: signals are passed on; when it is killed, its command ends" {
  local signal code
  set -m # otherwise bash makes the next command ignore SIGINT
  for signal in INT TERM HUP USR1; do
    "$CLUSTER" run node1 bash -c "trap 'exit 9' $signal; touch ready; while :; do sleep 0.05; done" &
    eventually rm ready
    kill "-$signal" $!
    code=0
    wait $! || code=$?
    [[ $code == 9 ]]
  done
  "$CLUSTER" run node1 sleep 4712 &
  eventually on node1 pgrep -f '^sleep 4712'
  kill -KILL $!
  eventually is_gone_from node1 '^sleep 4712'
}

@test "env: the machine's own shell uses the cluster" {
  # shellcheck source=/dev/null
  source <("$CLUSTER" env)
  [[ $(sinfo -h -p batch -o %D) == 3 ]]
  [[ $(srun -N1 -w node2 hostname) == node2 ]]
  [[ $(ssh node3 hostname) == node3 ]]
  [[ $(pdsh -w node1 hostname) == "node1: node1" ]]
}

# --- faults -------------------------------------------------------------------------------------

@test "ssh and SLURM notice a cut link, and the link can be restored" {
  "$CLUSTER" cut node3
  run on login ssh -o ConnectTimeout=2 node3 true
  [[ $status == 255 ]]
  eventually node_state_is node3 'down*'
  "$CLUSTER" restore node3
  eventually node_state_is node3 idle
  on login ssh node3 true
}

@test "a link is slowed, a port is dropped, and both are restored" {
  "$CLUSTER" slow node2 10mbit
  run timeout 0.8 "$CLUSTER" run login ssh node2 head -c 2000000 /dev/zero
  [[ $status == 124 ]]
  "$CLUSTER" drop node2 22
  run timeout 1 "$CLUSTER" run login ssh node2 true
  [[ $status == 124 ]]
  on login ssh node1 true
  "$CLUSTER" restore node2
  timeout 5 "$CLUSTER" run login ssh node2 head -c 2000000 /dev/zero >zeros
}

# --- up and down --------------------------------------------------------------------------------

# Gives the test its own folder for clusters, and records what those clusters must not change.
set_apart() {
  export CLUSTER_DIR=$PWD/other
  : >namespaces
  BEFORE=$(traces)
}

up_and_remember() { # <nodes>
  "$CLUSTER" up "$1"
  cut -d ' ' -f 2 -- "$CLUSTER_DIR"/hosts/* >>namespaces
}

# Everything that a cluster could leave behind, except processes, as one text.
traces() {
  ls /sys/class/net
  ip netns
  ls -A /run /run/netns ~/.ssh 2>&1 || true # not all of these have to exist
  cat /proc/self/mounts /etc/hosts
}

# The processes of clusters in CLUSTER_DIR, found by PID namespace or by this variable.
processes() (
  export -n CLUSTER_DIR # otherwise these commands would be found too
  {
    find /proc/[0-9]*/ns/pid -printf '%l %p\n' 2>/dev/null | grep -F -f namespaces
    grep -lsz "^CLUSTER_DIR=$CLUSTER_DIR\$" /proc/[0-9]*/environ
  } | grep -oE '/proc/[0-9]+' | cut -d / -f 3 | sort -u
)

no_processes() {
  [[ -z $(processes) ]]
}

assert_nothing_left() {
  [[ ! -e $CLUSTER_DIR ]]
  diff <(echo "$BEFORE") <(traces)
  eventually no_processes
}

@test "another cluster beside this one: up twice, down twice; nothing is left" {
  set_apart
  up_and_remember 1
  on login sbatch --output=/dev/null --wrap 'setsid sleep 4713 & sleep 4713'
  eventually on node1 pgrep -f '^sleep 4713'
  mkdir full
  on node1 mount -t tmpfs -o size=64k full "$PWD/full"
  up_and_remember 2
  [[ $(on login srun -N2 hostname | sort) == $'node1\nnode2' ]]
  "$CLUSTER" down
  "$CLUSTER" down
  assert_nothing_left
}

@test "after kill -9 of everything: down cleans up, and up starts again" {
  set_apart
  local again pids
  for again in up down; do
    up_and_remember 1
    mapfile -t pids < <(processes)
    ((${#pids[@]} > 10))                        # two hosts, their daemons and parents
    kill -KILL "${pids[@]}" 2>/dev/null || true # some die with a host's first process
    "$CLUSTER" "$again"
    [[ $again == down || $(on login srun hostname) == node1 ]]
  done
  assert_nothing_left
}

@test "an up that fails reports why and leaves nothing behind" {
  set_apart
  mkdir fake
  printf '#!/bin/sh\necho "no controller today" >&2\nexit 1\n' >fake/slurmctld
  chmod +x fake/slurmctld
  PATH=$PWD/fake:$PATH run "$CLUSTER" up 1
  [[ $status != 0 && $output == *"no controller today"* ]]
  assert_nothing_left
}

@test "a folder with other files in it is neither used nor removed" {
  mkdir other
  touch other/precious
  CLUSTER_DIR=$PWD/other run "$CLUSTER" up 1 <<<'what somebody types'
  [[ $status == 2 && $output == *"$PWD/other contains other files; set CLUSTER_DIR to another folder" ]]
  CLUSTER_DIR=$PWD/other "$CLUSTER" down
  [[ -e other/precious ]]
}

@test "a job ends at its time limit" {
  eventually has_ended "$TIMED"
  [[ $(on login scontrol show job "$TIMED") == *JobState=TIMEOUT* ]]
}
