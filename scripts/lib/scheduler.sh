# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# Where are we: in a SLURM or PBS allocation, in a step of one, on a login node, on a plain machine?

SLURM_INTERACTIVE_STEP=4294967290 # the step that salloc's own shell runs in

# Whether srun started this script.
in_slurm_step() {
  [[ -n ${SLURM_STEP_ID:-} && $SLURM_STEP_ID != "$SLURM_INTERACTIVE_STEP" ]]
}

# Refuses where this script was given more nodes than one: the step's, else the job's.
refuse_many_nodes() {
  local nodes=1
  if in_slurm_step; then
    nodes=${SLURM_STEP_NUM_NODES:-1}
  elif [[ -n ${SLURM_JOB_ID:-} ]]; then
    nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}
  fi
  ((nodes == 1)) || die 2 "this allocation has $nodes nodes and $PROGRAM starts one; use srun scripts/cluster_train.sh CONFIG"
}

warn_on_login_node() {
  [[ -z ${SLURM_JOB_ID:-}${PBS_JOBID:-} ]] || return 0
  timeout 3 sinfo &>/dev/null || timeout 3 qstat &>/dev/null || return 0 # there, and with a cluster behind
  echo "$PROGRAM: warning: this looks like a login node; get an allocation first (salloc, qsub -I)" >&2
}

# Number of nodes, node rank and master from srun's step. What the arguments say must agree.
plan_from_step() {
  ((SLURM_STEP_NUM_TASKS == SLURM_STEP_NUM_NODES)) ||
    die 2 "srun started $SLURM_STEP_NUM_TASKS tasks on $SLURM_STEP_NUM_NODES nodes; give it --ntasks=$SLURM_STEP_NUM_NODES --ntasks-per-node=1 [wrong-world]"
  agree nnodes NUM_NODES SLURM_STEP_NUM_NODES
  agree node_rank NODE_RANK SLURM_NODEID
  plan[master]=${plan[master]-${MASTER_ADDR:-$(run_ours distributed.hostlist first "$SLURM_STEP_NODELIST")}}
}

# In a job, outside of its steps: its nodes, the first of which is the master, and the ranks on each.
plan_from_job() { # <the script's own path>
  local tasks=1
  [[ -z ${SLURM_NTASKS:-} ]] || tasks=$SLURM_TASKS_PER_NODE # else it only counts the processors
  [[ -n ${SLURM_JOB_ID:-} && -n ${SLURM_JOB_NUM_NODES:-} ]] || die 2 "this is no SLURM job; use sbatch $0, or salloc first"
  ! in_slurm_step || die 2 "srun started $PROGRAM, which starts srun itself; leave srun out"
  [[ -z ${SLURM_HET_SIZE:-} ]] ||
    die 2 "a heterogeneous job has nodes that differ, and this starts the same on each; leave out the : and what follows, or start train.py with srun --het-group [wrong-world]"
  [[ $tasks =~ ^([0-9]+)(\(x[0-9]+\))?$ ]] ||
    die 2 "the job has unequal nodes, SLURM_TASKS_PER_NODE=$tasks; give sbatch --ntasks-per-node [wrong-world]"
  tasks=${BASH_REMATCH[1]}
  require_word LAUNCHER agent srun
  [[ ${LAUNCHER:-agent} == agent ]] || plan[engine]=$LAUNCHER
  [[ -z ${plan[engine]:-} || -z ${TRAIN_SCRIPT:-} ]] ||
    echo "$PROGRAM: warning: LAUNCHER=srun sets no RANK: $TRAIN_SCRIPT must call init_distributed(), or read SLURM's variables" >&2
  plan[nnodes]=$SLURM_JOB_NUM_NODES
  plan[master]=$(run_ours distributed.hostlist first "$SLURM_JOB_NODELIST")
  plan[hosts]=$SLURM_JOB_NODELIST
  # What the user typed was not the copy that runs.
  local script=$1
  [[ $1 -ef $ROOT/$1 ]] || script=$ROOT/$1
  local asked=${plan[nproc]-${NPROC_PER_NODE:-}} size=(--nodes="$SLURM_JOB_NUM_NODES")
  if ((tasks > 1)); then
    [[ ${asked:-$tasks} == "$tasks" ]] ||
      die 2 "$asked processes per node, but the job has SLURM_TASKS_PER_NODE=$SLURM_TASKS_PER_NODE; leave the number out [wrong-world]"
    plan[nproc]=$tasks
    size+=(--ntasks-per-node="$tasks")
  else
    plan[nproc]=${asked:-${SLURM_GPUS_ON_NODE:-auto}}
  fi
  [[ -z ${SLURM_GPUS_ON_NODE:-} ]] || size+=(--gpus-per-node="$SLURM_GPUS_ON_NODE")
  [[ ${0##*/} != slurm_script ]] || LAUNCH_LINE=(sbatch "${size[@]}" "$script" "${LAUNCH_LINE[@]:1}")
}

agree() { # <plan entry> <name of the argument> <variable of the step>
  [[ ${plan[$1]=${!3}} == "${!3}" ]] ||
    die 2 "the argument $2 is ${plan[$1]@Q} but srun's $3 is ${!3}; leave the argument out (the batch shell may have expanded it) [wrong-world]"
}

# A job of several nodes, but no srun: this would be node rank 0 waiting for nobody.
refuse_batch_step() {
  local nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}
  [[ -z ${SLURM_JOB_ID:-} ]] || ((nodes == 1)) ||
    die 2 "the job has $nodes nodes and no srun started $PROGRAM on them; use srun scripts/cluster_train.sh CONFIG [batch-step]"
}
