#!/usr/bin/env bats
bats_require_minimum_version 1.5.0
load helper

launch() {
  "$ROOT/scripts/run_ddp.sh" "$@"
}

@test "--dry-run: the golden command, long and short options" {
  export RUN_ID=golden MASTER_PORT=23456
  run --separate-stderr launch -n 2 -c plain.yaml -l INFO --dry-run
  [[ $status == 0 ]]
  local command
  command=$(golden_command "MASTER_PORT=23456 $ROOT/scripts/run_ddp.sh -n 2 -c plain.yaml -l INFO" \
    1 0 2 127.0.0.1 "$ROOT/train.py --config plain.yaml")
  command=${command/"INFO' "/"INFO' LOG_LEVEL=INFO "}
  assert_output "# node 0 ($HOST): ranks 0-1 of 2, rendezvous 127.0.0.1:23456
$command"
  run --separate-stderr launch --num-gpus=2 --config plain.yaml --log-level=INFO --dry-run
  [[ ${output#* --nnodes} == "${command#* --nnodes}" ]]
  run --separate-stderr launch -n2 -c plain.yaml --dry-run
  [[ $status == 0 && $output == *" --nproc-per-node 2 "* ]]
}

# bats test_tags=slow
@test "--config-path and --config-name, and the default config" {
  mkdir conf
  make_config conf/small.yaml
  run --separate-stderr launch --config-path=conf --config-name=small --num-gpus=2 --dry-run
  [[ $output == *" --config conf/small.yaml" ]]
  run --separate-stderr launch --config-path conf --config-name small.yaml --dry-run
  [[ $output == *" --config conf/small.yaml" ]]
  mkdir code
  echo pass >code/own.py
  cd code
  TRAIN_SCRIPT=own.py run --separate-stderr launch --config-path=../conf --config-name=small --dry-run
  [[ $output == *" --config ../conf/small.yaml" ]]
  cd "$OLDPWD"
  TRAIN_SCRIPT=code/own.py run --separate-stderr launch --config-path=../conf --config-name=small --dry-run
  [[ $output == *" --config code/../conf/small.yaml" ]] # relative to the script, as in Hydra
  run --separate-stderr launch --dry-run
  [[ $output == *" --config $ROOT/config/local3.yaml" ]]
  TRAIN_SCRIPT=own.py run --separate-stderr launch --dry-run
  [[ $output == *" own.py" ]]
}

@test "two configs are refused, in one line" {
  run launch -c plain.yaml --config-path=conf --config-name=small --dry-run
  assert_refused 2 "run_ddp.sh: --config, and --config-path or --config-name, name two configs"
}

@test "a Hydra script gets the config's folder and name unchanged" {
  printf 'import hydra\n@hydra.main(config_path="conf", config_name="small")\ndef main(config): ...\n' >own.py
  TRAIN_SCRIPT=own.py run --separate-stderr launch --config-path ../conf a=1 --dry-run -- --multirun
  [[ $output == *" own.py a=1 --config-path=../conf --multirun" ]]
  TRAIN_SCRIPT=own.py run --separate-stderr launch --config-path=../conf --config-name=small --dry-run
  [[ $output == *" own.py --config-path=../conf --config-name=small" ]]
}

@test "launch_distributed_train.sh is another name for it" {
  run "$ROOT/scripts/launch_distributed_train.sh" --config-path=conf
  assert_refused 2 "launch_distributed_train.sh: --config-path and --config-name go together"
  run --separate-stderr "$ROOT/scripts/launch_distributed_train.sh" -n 3 -c plain.yaml --dry-run
  [[ $output == *" --nproc-per-node 3 "* ]]
}

# bats test_tags=slow,long
@test "arguments arrive byte for byte" {
  make_dump
  make_config "$ODD_CONFIG"
  launch -n 1 -c "$ODD_CONFIG" "${ODD_SETTINGS[@]}" -- "${ODD_REST[@]}"
  assert_odd_dumped
}

# bats test_tags=slow
@test "bad arguments: exit 2, one line" {
  run launch -n 0
  assert_refused 2 "the number of processes is '0'"
  run launch -n
  assert_refused 2 "option -n needs a value"
  run launch -c missing.yaml
  assert_refused 2 "there is no config file 'missing.yaml'"
  run launch -l loud
  assert_refused 2 "LOG_LEVEL is 'loud'"
  run launch -x 2
  assert_refused 2 "unknown option '-x'"
  run launch plain.yaml
  assert_refused 2 "unexpected argument 'plain.yaml'; usage: scripts/run_ddp.sh [-n NPROC] [-c CONFIG]"
}

@test "an allocation of several nodes: exit 2, and what to use" {
  SLURM_JOB_ID=5 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 run launch -c plain.yaml
  assert_refused 2 "this allocation has 2 nodes, but run_ddp.sh uses only one; use srun --nodes=2 --ntasks=2 --overlap scripts/cluster_train.sh CONFIG"
}

# bats test_tags=slow
@test "a PBS allocation of several nodes is trained on over ssh" {
  printf '%s\n' n1 n1 n2 >nodes
  PBS_JOBID=6.host PBS_NODEFILE=nodes run launch -n 3 -c plain.yaml --dry-run
  [[ $status == 0 && $output == *"6 = 2 nodes x 3"*"ssh -t -- n1 "*"ssh -t -- n2 "* ]]
}

# bats test_tags=slow
@test "an allocation of one node, or a step of one, trains here under the job's id" {
  printf 'n1\nn1\n' >nodes
  PBS_JOBID=6.host PBS_NODEFILE=nodes run launch -c plain.yaml --dry-run
  [[ $status == 0 && $output == *"run        6.host    plain.yaml"* ]]
  echo n1 >nodes
  fake_tool qstat 'echo "    schedselect = 1:ncpus=16:ngpus=4"'
  PBS_JOBID=6.host PBS_NODEFILE=nodes run launch -c plain.yaml --dry-run
  [[ $status == 0 && $output == *"4 = 1 node x 4"* ]]
  PBS_JOBID=6.host PBS_NODEFILE=nodes NPROC_PER_NODE=2 run launch -c plain.yaml --dry-run
  [[ $status == 0 && $output == *"2 = 1 node x 2"* ]]
  SLURM_STEP_ID=0 SLURM_JOB_ID=8 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=3 run launch -c plain.yaml --dry-run
  [[ $output == *"run        7_3    plain.yaml"* ]]
}

# bats test_tags=slow
@test "a login node is warned about" {
  local told="warning: this looks like a login node"
  run launch -c plain.yaml --dry-run
  [[ $output != *"$told"* ]]
  fake_tool sinfo ''
  run launch -c plain.yaml --dry-run
  [[ $status == 0 && $output == *"$told"* ]]
  SLURM_JOB_ID=5 run launch -c plain.yaml --dry-run
  [[ $output != *"$told"* ]]
  rm fake/sinfo
  fake_tool qstat ''
  run launch -c plain.yaml --dry-run
  [[ $status == 0 && $output == *"$told"* ]]
}
