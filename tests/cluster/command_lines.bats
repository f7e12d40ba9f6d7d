#!/usr/bin/env bats
# The command lines of guides to distributed training, as people type them, in a repository with the
# usual names: main.py, conf/, configs/. The result of each is printed as a row of a table.
# shellcheck disable=SC2030,SC2031 # each test is a subshell, and is meant to be one
# bats file_tags=prove,long
bats_require_minimum_version 1.5.0
load helper

ROOT=$(cd -- "$BATS_TEST_DIRNAME/../.." && pwd -P)

setup_file() {
  cluster_up 3
}

teardown_file() {
  cluster_down
}

setup() {
  cd -- "$BATS_TEST_TMPDIR" || return
  cp -r -- "$ROOT"/{scripts,launcher,distributed,training,train.py} .
  mkdir config conf configs logs
  cp train.py main.py
  cat >config/distributed.yaml <<'YAML'
distributed: {backend: gloo}
YAML
  cat >config/local3.yaml <<'YAML'
defaults: [distributed, _self_]
model: {layers: 1, width: 16}
train: {max_steps: 4, batch_size: 2, eval_every: 0}
YAML
  local copy
  for copy in config/train_config configs/{Repurpose,default_config,my_config} conf/gpt2_frozen; do
    cp config/local3.yaml "$copy.yaml"
    cp config/distributed.yaml "${copy%/*}/" 2>/dev/null || true
  done
  export OMP_NUM_THREADS=1 PATH=${PYTHON%/*}:$PATH
}

# Types a command on a host, and prints its row.
row() { # <exit code expected> <pattern of an output line> <host> <command line>
  local code=0 line
  timeout 600 "$CLUSTER" run "$3" bash -c "$4" >out 2>&1 || code=$?
  line=$(grep -E -m 1 -- "$2" out) || line="no line matches $2"
  echo "# | \`$4\` | $code | \`${line:0:120}\` |" >&3
  if ((code != $1)) || [[ $line == "no line matches"* ]]; then cat out && false; fi
}

# Does the same for a command that submits jobs, and also checks how they end.
job_row() { # <state expected> <pattern of a line of its log> <command line>
  local job state line logs
  on login bash -c "$3" >out 2>&1 || { cat out && false; }
  while read -r job; do
    eventually has_ended "$job"
    logs+=" logs/slurm-$job.out"
  done < <(grep -oE '^(Submitted batch job|job) +[0-9]+' out | grep -oE '[0-9]+')
  state=$(on login scontrol show job "$job" | grep -oE '\bExitCode=[0-9]+' | head -n 1)
  # shellcheck disable=SC2086 # names without spaces
  line=$(cat out $logs | grep -E -m 1 -- "$2") || line="no line matches $2"
  echo "# | \`$3\` | ${state#*=} | \`${line:0:120}\` |" >&3
  # shellcheck disable=SC2086
  [[ ${state#*=} == "$1" && $line != "no line matches"* ]] || { cat out $logs && false; }
}

DONE='done       step 4 '

@test "command lines for one machine" {
  # No speed is measured here, because other tests run at the same time; make prove measures speeds.
  row 0 '^PASS  2 ranks' node1 'scripts/test_distributed.sh 2 --test basic'
  row 0 '^PASS  4 ranks' node1 'scripts/test_distributed.sh 4 --test basic'
  row 0 "$DONE" node1 'scripts/ssh/launch_singlenode.sh config/local3.yaml 4'
  row 0 "$DONE" node1 'python main.py --config_path configs/Repurpose.yaml'
  row 0 "$DONE" node1 'torchrun --nproc_per_node=2 main.py --config_path configs/Repurpose.yaml'
  row 0 "$DONE" node1 'scripts/run_ddp.sh -n 2'
  row 0 "$DONE" node1 'scripts/run_ddp.sh -n 2 -c configs/Repurpose.yaml -l INFO'
  row 0 "$DONE" node1 'torchrun --nproc_per_node=2 --nnodes=1 --node_rank=0 --master_addr=localhost --master_port=29500 main.py --config_path configs/Repurpose.yaml'
  row 0 "$DONE" node1 'python -m torch.distributed.launch --nproc_per_node=2 --use_env main.py --config_path configs/Repurpose.yaml'
  row 0 "$DONE" node1 'torchrun --nproc_per_node=8 main.py --config-path=conf --config-name=gpt2_frozen'
  row 0 "$DONE" node1 'scripts/launch_distributed_train.sh --config-path=conf --config-name=gpt2_frozen --num-gpus=8'
  row 0 '^PASS  1 rank ' node1 'python -m distributed.selftest --test basic'
  row 0 '^PASS  2 ranks' node1 'torchrun --nproc_per_node=2 -m distributed.selftest --test all'
  row 0 "$DONE" node1 'scripts/cluster_train.sh config/train_config.yaml'
  row 0 "$DONE" node1 'NPROC_PER_NODE=8 scripts/cluster_train.sh config/train_config.yaml'
  row 0 "$DONE" node1 'LOG_LEVEL=DEBUG scripts/cluster_train.sh config/train_config.yaml'
  row 0 "$DONE" node1 'BACKEND=gloo scripts/cluster_train.sh config/train_config.yaml'
  ( # the tests' PYTHON would take precedence
    unset PYTHON
    row 3 'CONDA_ENV is set but there is no conda' node1 'CONDA_ENV=my_env scripts/cluster_train.sh config/train_config.yaml'
  )
  row 0 '^usage: ' node1 'CONDA_ENV=base LOG_LEVEL=DEBUG scripts/cluster_train.sh --help'
  row 0 '^ok: ' node1 'python train.py --config config/train_config.yaml --check'
}

@test "command lines for several machines" {
  row 0 "$DONE" login 'scripts/ssh/launch_torchrun_auto.sh config/local3.yaml 4 node1 node2'
  row 0 'node_0.log' login 'ls logs/node_*.log'
  row 0 "$DONE" login 'scripts/ssh/launch_torchrun_auto.sh config/local3.yaml 8 node1 node2 node3'
  row 0 "$DONE" login 'scripts/ssh/launch_multinode.sh config/local3.yaml 2 node1 node2'
  row 0 "$DONE" login 'scripts/ssh/launch_pdsh_multinode.sh config/local3.yaml 2 node[1-3]'
  local address
  address=$(on node1 hostname -i)
  on node2 scripts/cluster_train.sh config/train_config.yaml 2 1 "$address" 29500 >worker.out 2>&1 3>&- &
  row 0 "$DONE" node1 "scripts/cluster_train.sh config/train_config.yaml 2 0 $address 29500"
  wait $!
  printf '%s\n' node1 node2 >nodefile
  # shellcheck disable=SC2016 # expanded on the hosts
  local line='NODE_RANK=$(grep -n $(hostname) $PBS_NODEFILE | head -n 1 | cut -d: -f1); scripts/cluster_train.sh config/train_config.yaml 2 $((NODE_RANK - 1)) $(head -n 1 $PBS_NODEFILE) 29500'
  export PBS_NODEFILE=$PWD/nodefile PBS_JOBID=1.pbs PBS_O_WORKDIR=$PWD
  on node2 bash -c "$line" >worker.out 2>&1 3>&- &
  row 0 "$DONE" node1 "$line"
  wait $!
}

@test "command lines under SLURM" {
  job_row 0 "$DONE" 'sbatch scripts/slurm/slurm_train_single_node.sh'
  job_row 0 "$DONE" 'sbatch scripts/slurm/slurm_train.sh'
  row 0 "$DONE" login 'salloc --nodes=2 --ntasks-per-node=4 --gres=gpu:4 --time=1:00:00 srun python -u train.py --config configs/default_config.yaml'
  row 0 "$DONE" login 'salloc --nodes=2 --ntasks-per-node=4 --gres=gpu:4 srun python -u train.py --config configs/my_config.yaml --nodes 2 --gpus-per-node 4'
  job_row 0 "$DONE" 'scripts/submit_with_config.sh config=conf/gpt2_frozen.yaml num_gpus_train=8'
  job_row 0 'warning: num_gpus is for a script that prepares the training' 'scripts/submit_with_config.sh config=conf/gpt2_frozen.yaml num_gpus=8 num_gpus_train=4'
  job_row 0 "$DONE" 'scripts/submit_with_config.sh config=conf/gpt2_frozen.yaml num_gpus_train=4 nodelist=node1'
  job_row 0 'nodelist=node1,node2 is ignored' 'scripts/submit_with_config.sh config=conf/gpt2_frozen.yaml num_gpus_train=8 nodelist=node1,node2'
  row 0 '^PASS       the nodes work together' login 'scripts/test_distributed_integration.sh'
  # shellcheck disable=SC2016 # expanded in the job
  row 2 'srun --nodes=2 --ntasks=2' login 'salloc --nodes=2 bash -c '\''scripts/cluster_train.sh config/train_config.yaml $SLURM_NNODES $SLURM_NODEID node1 29500'\'
  # shellcheck disable=SC2016 # expanded in the job
  row 0 "$DONE" login 'salloc --nodes=2 srun --ntasks=2 bash -c '\''torchrun --nnodes=2 --nproc_per_node=2 --node_rank=$SLURM_NODEID --master_addr=node1 --master_port=29500 main.py --config_path configs/Repurpose.yaml'\'
}
