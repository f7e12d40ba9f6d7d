#!/usr/bin/env bats
bats_require_minimum_version 1.5.0
load helper

# A job's copy of the script, in the spool folder of PBS, started in the user's home.
launch() {
  cp -- "$ROOT/scripts/pbs/pbs_train.sh" 7.host.SC
  (cd / && PBS_JOBID=7.host PBS_O_WORKDIR=$OLDPWD PBS_NODEFILE=$OLDPWD/nodes "$OLDPWD/7.host.SC" "$@")
}

setup_folder() {
  ln -s -- "$ROOT"/{config,scripts} .
  printf '%s\n' n2 n2 n1 n1 >nodes
}

# bats test_tags=slow
@test "the nodes of the node file, in its order, each with as many processes as it has lines" {
  setup_folder
  run launch --dry-run
  [[ $status == 0 && $output == *"run        7.host "*"n2 (master, n2:"*"  n1"*"4 = 2 nodes x 2"* ]]
  [[ $output == *"'LAUNCH_COMMAND=qsub -V scripts/pbs/pbs_train.sh'"* ]]
  TRAIN_SCRIPT=x CONFIG=- run launch a=1 resume=never --dry-run -- 2
  [[ $output == *"LAUNCH_COMMAND=TRAIN_SCRIPT=x"*" CONFIG=-"*" qsub"*" -V"*" -F"*" a=1"*" --"*" 2"*" scripts/pbs/pbs_train.sh"* ]]
  [[ ${lines[6]%%resume=never*} == *pbs_train.sh* ]]
  NPROC_PER_NODE=4 CONFIG=plain.yaml run launch --dry-run
  [[ $output == *"plain.yaml"*"8 = 2 nodes x 4"* ]]
}

@test "nodes that stand there once: one process for each GPU" {
  setup_folder
  printf '%s\n' n1 n2 >nodes
  fake_gpus 4
  run launch plain.yaml --dry-run
  [[ $status == 0 && $output == *"8 = 2 nodes x 4, nccl"* ]]
}

@test "chunks that PBS packs on one node: one process for each GPU that qstat tells, or a warning" {
  setup_folder
  printf '%s\n' n1 n1 >nodes
  fake_gpus 8
  run launch plain.yaml --dry-run
  [[ $status == 0 && $output == *"2 = 1 node x 2, nccl"* ]]
  [[ $output == *"warning    n1 has 8 GPUs, the node file 2 lines for it; NPROC_PER_NODE sets the ranks of each node"* ]]
  fake_tool qstat 'echo "    schedselect = 2:ncpus=16:ngpus=4"'
  run launch plain.yaml --dry-run
  [[ $status == 0 && $output == *"8 = 1 node x 8, nccl"* && $output != *"warning"* ]]
}

@test "a copy far from the project: exit 2, and what to do" {
  touch nodes
  run launch plain.yaml
  [[ $status == 2 && $output == "pbs_train.sh: this is a copy and finds no scripts/lib; submit it from the project's folder or the one around launch-kit/" ]]
}

@test "outside of a job: exit 2, and what to do" {
  run "$ROOT/scripts/pbs/pbs_train.sh" plain.yaml
  assert_refused 2 "this is no PBS job; ask for nodes with qsub -l select=2:ncpus=16:ngpus=4 (PBS Pro, OpenPBS) or qsub -l nodes=2:ppn=4 (Torque)"
}

@test "a job of another size than asked for: exit 2, and how PBS Pro and Torque are asked" {
  setup_folder
  PBS_NUM_NODES=3 run launch plain.yaml
  assert_refused 2 "the job's node file names 2 nodes where 3 should be; ask for nodes with qsub -l select=2:ncpus=16:ngpus=4 (PBS Pro, OpenPBS) or qsub -l nodes=2:ppn=4 (Torque)"
  : >nodes
  run launch plain.yaml
  assert_refused 2 "the job's node file names 0 nodes where some should be; ask for nodes with qsub"
}

@test "the script itself asks for no nodes: the two dialects refuse each other's words" {
  run grep -E '^#PBS .*(select|nodes)=' "$ROOT/scripts/pbs/pbs_train.sh"
  [[ $status == 1 ]]
  run "$ROOT/scripts/pbs/pbs_train.sh" plain.yaml --dry-run
  [[ $status == 0 && $output == *"chosen by the scheduler"*"qsub -V -F plain.yaml "*pbs_train.sh* ]]
}
