# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# Fan-out through srun, from a job's batch script or from salloc's shell: one agent on each node,
# which takes its node rank from the step; with LAUNCHER=srun one task for each rank instead.

STEP=    # srun's process
STOPPED= # the last signal that stopped it
NOTICE=  # came ahead of the time limit, or of pre-emption

# A notice that comes while nodes are checked must not end the script: it is heeded at the start.
fanout_check() {
  local facts code=0
  [[ -n $DRY_RUN ]] || trap 'NOTICE=USR1' USR1
  preflight_command --meet "${plan[nnodes]}"
  agent_step --kill-on-bad-exit=0
  facts=$("${COMMAND[@]}") || code=$?
  read_facts "$facts"
  compare_nodes "$facts" || exit
  ((code < 125 || code > 127)) ||
    refuse env-missing "the preflight did not start on every node, see above; let $PWD, $ROOT and $PYTHON be there as they are here"
  ((code == 0)) || exit "$code"
  plan[checked_nodes]=${plan[nnodes]}
}

fanout_print() {
  step_command
  printf '# job %s, %s: ranks 0-%s, rendezvous %s:%s\n' "$SLURM_JOB_ID" "$(count "${plan[nnodes]}" node)" \
    $((plan[nnodes] * plan[nproc] - 1)) "${plan[master]}" "${plan[port]}"
  echo "cd $(quote_line "$PWD") && $(quote_line "${COMMAND[@]}")"
}

# srun runs beside us, for bash holds traps back while a command is in the foreground. It is kept
# from the terminal's Ctrl-C, and from TERM: either makes it kill the step, with nothing saved.
fanout_start() {
  local code signal
  step_command
  [[ -z $NOTICE ]] || { requeue && exit 75; }
  trap 'NOTICE=USR1 && kill -s USR1 "$STEP"' USR1
  for signal in TERM HUP INT; do
    # shellcheck disable=SC2064 # now
    trap "stop_step $signal" "$signal"
  done
  setsid setpriv --pdeathsig TERM "${COMMAND[@]}" & # it ends with us, too
  STEP=$!
  until wait "$STEP" && code=0; do
    code=$?
    kill -0 "$STEP" 2>/dev/null || break # else a trap has ended the wait
  done
  # 138: the notice came before there was anything to save.
  if [[ -n $NOTICE && ($code == 75 || ($code == 138 && -n ${plan[checkpoint_dir]:-})) ]]; then requeue; fi
  exit "$code"
}

# TERM to every task, which may save; a second Ctrl-C ends them at once.
stop_step() { # <signal>
  local step
  step=$(squeue --noheader --steps --job="$SLURM_JOB_ID" --format="%i %j" | awk -v name="${plan[run_id]}" '$2 == name { print $1 }')
  if [[ $STOPPED$1 == INTINT || -z $step ]]; then kill -s TERM "$STEP"; else scancel --signal=TERM "$step"; fi
  STOPPED=$1
}

step_command() {
  if [[ -z ${plan[engine]:-} ]]; then
    node_command
    agent_step --kill-on-bad-exit=1
  else
    [[ ${SLURM_TASKS_PER_NODE%%[!0-9]*} == "${plan[nproc]}" ]] ||
      die 2 "LAUNCHER=srun starts the job's tasks, SLURM_TASKS_PER_NODE=$SLURM_TASKS_PER_NODE, for ${plan[nproc]} ranks per node; give --ntasks-per-node=${plan[nproc]} [wrong-world]"
    COMMAND=( # the GPUs that the script asks for need not be those that sbatch was told
      env LAUNCH_COMMAND="$(launch_line)" RUN_ID="${plan[run_id]}"
      ${SLURM_GPUS_PER_NODE:+SLURM_GPUS_PER_NODE="${SLURM_GPUS_ON_NODE:-}"}
      OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" srun --kill-on-bad-exit=1 --job-name="${plan[run_id]}"
      ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "$PYTHON" -u "${SCRIPT[@]}"
    )
  fi
}

# Puts COMMAND on every node once, with all that the job has there: srun itself would take over
# neither the processors nor, where sbatch was told otherwise than the script, the GPUs.
agent_step() { # <srun's options...>
  local words=(--nodes="${plan[nnodes]}" --ntasks="${plan[nnodes]}" --ntasks-per-node=1)
  words+=(--cpus-per-task="${SLURM_JOB_CPUS_PER_NODE%%[!0-9]*}")
  words+=(--job-name="${plan[run_id]}") # the step's, by which it alone is stopped
  [[ -z ${SLURM_GPUS_ON_NODE:-} ]] || words+=(--gpus-per-node="$SLURM_GPUS_ON_NODE")
  COMMAND=(env --unset=SLURM_GPUS_PER_TASK srun "${words[@]}" "$@" "${COMMAND[@]}")
}

# Back to the queue, where SLURM starts the job again under its id; not after three times without
# a new checkpoint.
requeue() {
  local folder=${LOG_DIR:-logs}/${plan[run_id]} newest=
  if [[ -n ${plan[checkpoint_dir]:-} ]]; then
    mkdir -p -- "$folder"
    newest=$(readlink "${plan[checkpoint_dir]}/${plan[run_id]}/latest" || echo none)
    echo "$newest" >>"$folder/requeues"
    if (($(tail -n 4 "$folder/requeues" | grep -cxF "$newest") == 4)); then
      echo "$PROGRAM: three restarts have gained no step; the job is not requeued" >&2
      return
    fi
  fi
  local job=$SLURM_JOB_ID # which for one task of an array is the whole array's
  [[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  scontrol requeue "$job"
}
