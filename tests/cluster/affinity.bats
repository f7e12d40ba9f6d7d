#!/usr/bin/env bats
# The CPUs of each rank, on nodes with two real CPUs to which SLURM binds tasks.
# shellcheck disable=SC2030,SC2031 # each test is a subshell, and is meant to be one
# bats file_tags=prove,long
bats_require_minimum_version 1.5.0
load helper

ROOT=$(cd -- "$BATS_TEST_DIRNAME/../.." && pwd -P)

setup_file() {
  CLUSTER_CPUS=2 cluster_up 2
}

teardown_file() {
  cluster_down
}

setup() {
  cd -- "$BATS_TEST_TMPDIR" || return
  export TRAIN_SCRIPT=$PWD/mask.py SHOW_RANKS=all LOG_DIR=$PWD/logs
  echo 'import os; print("rank", os.environ.get("RANK") or os.environ["SLURM_PROCID"], "has", len(os.sched_getaffinity(0)))' >mask.py
}

job() { # <sbatch's options, the script and its arguments...>
  eventually has_ended "$(on login sbatch --parsable --output=out "$@")"
}

masks_are() { # <CPUs of each of two ranks>
  cat out
  [[ $(grep -o 'rank [0-9]* has .*' out | sort) == "rank 0 has $1"$'\n'"rank 1 has $1" ]]
}

@test "sbatch: each rank has the CPUs that the job asks for" {
  local cpus
  for cpus in 1 2; do
    job --gpus-per-node=1 --cpus-per-gpu="$cpus" "$ROOT/scripts/slurm/slurm_train.sh" -
    masks_are "$cpus"
    grep -q "^cpus       $cpus per rank of node1" out
    rm out
  done
}

@test "sbatch from a shell that srun has bound to one CPU: the CPUs that the job asks for" {
  local launcher
  export SLURM_CPU_BIND=quiet,mask_cpu:0x1 SLURM_CPU_BIND_TYPE=mask_cpu: SLURM_CPU_BIND_LIST=0x1
  for launcher in '' srun; do
    LAUNCHER=$launcher job --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-gpu=2 "$ROOT/scripts/slurm/slurm_train.sh" -
    masks_are 2
    rm out
  done
  SLURM_CPU_BIND_LIST='' LAUNCHER=srun job --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-gpu=2 "$ROOT/scripts/slurm/slurm_train.sh" -
  masks_are 1 # the user's own choice
}

@test "sbatch: fewer CPUs than ranks are a warning" {
  NPROC_PER_NODE=2 job --nodes=1 --gpus-per-node=1 --cpus-per-gpu=1 "$ROOT/scripts/slurm/slurm_train_single_node.sh" -
  masks_are 1
  grep -q '^slurm_train_single_node.sh: warning: node1: 1 CPU for 2 ranks; .* \[few-cpus\]$' out
}

@test "salloc: the CPUs of the allocation" {
  on login salloc --quiet --nodes=2 --gpus-per-node=1 --cpus-per-gpu=1 "$ROOT/scripts/slurm/slurm_train.sh" - >out 2>&1
  masks_are 1
}

@test "srun: the CPUs of the step's task" {
  on login srun --nodes=2 --ntasks=2 --cpus-per-task=1 "$ROOT/scripts/cluster_train.sh" - >out 2>&1
  masks_are 1
}

@test "ssh: the CPUs of the machine" {
  on login "$ROOT/scripts/ssh/launch_torchrun_auto.sh" - 1 node1 node2 >out 2>&1
  masks_are "$(nproc)"
}
