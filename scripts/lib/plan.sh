# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# What will run, where and how: decided here, once, before anything starts. An argument wins over
# the environment, that over the config, that over the default.
#
# plan[...]: config nproc nnodes node_rank master port run_id backend join_timeout checkpoint_dir,
# and from the preflight: gpus checks warnings seconds checked_nodes.

SCRIPT=() # the training script and its arguments, the agent's last words

require_number() { # <what it is called> <value> <least> <most>
  [[ $2 =~ ^[0-9]{1,9}$ ]] && ((10#$2 >= $3 && 10#$2 <= $4)) && return
  die 2 "$1 is ${2@Q}; give a whole number from $3 to $4"
}

plan_number() { # <plan entry> <what it is called> <least> <most>
  require_number "$2" "${plan[$1]}" "$3" "$4"
  plan[$1]=$((10#${plan[$1]}))
}

require_word() { # <what it is called> <value> <word allowed...>
  local word
  for word in "${@:3}"; do
    [[ $2 == "$word" ]] && return
  done
  die 2 "$1 is ${2@Q}; it can be ${*:3}"
}

# Takes from the environment what the arguments left open, and refuses what cannot be meant.
plan_settings() {
  plan_defaults nproc "${NPROC_PER_NODE:-auto}" nnodes 1 node_rank 0 port "${MASTER_PORT:-auto}"
  [[ ${plan[nproc]} == auto ]] || plan_number nproc "the number of processes" 1 4096
  [[ ${plan[port]} == auto ]] || plan_number port "the port" 1 65535
  plan_number nnodes "the number of nodes" 1 100000
  plan_number node_rank "the node rank" 0 $((plan[nnodes] - 1))
  if ((plan[nnodes] == 1)); then
    plan_defaults master 127.0.0.1
  else
    plan_defaults master "${MASTER_ADDR:-}"
  fi
  [[ -n ${plan[master]} ]] ||
    die 2 "$(count "${plan[nnodes]}" node) but no address of the master; give MASTER_ADDR"
  plan_environment
  plan_run_id
}

plan_defaults() { # <plan entry> <value> ...
  while (($#)); do
    plan[$1]=${plan[$1]-$2}
    shift 2
  done
}

# What the agent and the ranks read from the environment themselves.
plan_environment() {
  LOG_LEVEL=${plan[log_level]-${LOG_LEVEL:-}}
  [[ -z $LOG_LEVEL ]] || require_word LOG_LEVEL "$LOG_LEVEL" DEBUG INFO WARNING ERROR
  [[ -z ${BACKEND:-} ]] || require_word BACKEND "$BACKEND" nccl gloo
  require_number MAX_RESTARTS "${MAX_RESTARTS:-0}" 0 1000
  require_number GRACE "${GRACE:-30}" 0 86400
}

# For the scripts whose CONFIG may be left out. A training script of the user's needs none.
default_config() {
  local default=$ROOT/config/local3.yaml
  [[ $PWD != "$ROOT" ]] || default=config/local3.yaml
  [[ -z ${TRAIN_SCRIPT:-} ]] || default=-
  plan_defaults config "$default"
}

# Nodes that are started by hand cannot agree on a run id, and on its port, before they meet.
by_hand() {
  [[ ${plan[nnodes]-1} == 1 ]] || plan_defaults port "${MASTER_PORT:-29500}"
}

# RUN_ID, else the scheduler's job, else a new one. Nodes started by hand take it from node rank 0.
plan_run_id() {
  plan[run_id]=${RUN_ID:-}
  if [[ -n ${plan[run_id]} ]]; then
    [[ ${plan[run_id]} =~ ^[A-Za-z0-9_][][A-Za-z0-9_.-]*$ ]] ||
      die 2 "RUN_ID is ${RUN_ID@Q}; use letters, digits, and . _ - only"
    [[ ! ${plan[run_id]} =~ ^(latest|distributed_training|node_[0-9]+\.log)$ ]] ||
      die 2 "RUN_ID is ${RUN_ID@Q}, a name that the log folder needs itself; choose another"
  elif [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
    plan[run_id]=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  elif [[ -n ${SLURM_JOB_ID:-${PBS_JOBID:-}} ]]; then
    plan[run_id]=${SLURM_JOB_ID:-$PBS_JOBID}
  elif ((plan[node_rank] == 0)); then
    printf -v "plan[run_id]" '%(%Y%m%d-%H%M%S)T-%04x' -1 $(($$ % 65536))
  fi
}

# Sets SCRIPT and, for train.py, has the config and the settings checked.
plan_script() {
  local flag=${CONFIG_FLAG:---config}
  [[ -n ${plan[config]+given} ]] || die 2 "no config; usage: $(usage_line)"
  [[ ${plan[config]} == - || -n ${CONFIG_FLAG:-} || -f ${plan[config]} ]] ||
    die 2 "there is no config ${plan[config]@Q}; give the path of a YAML file"
  if [[ ! ${TRAIN_SCRIPT:-$ROOT/train.py} -ef $ROOT/train.py ]]; then
    SCRIPT=("$TRAIN_SCRIPT")
    [[ ${plan[config]} == - ]] || SCRIPT+=("$flag" "${plan[config]}")
    SCRIPT+=("${SETTINGS[@]}" "${REST[@]}")
    return
  fi
  SCRIPT=("$ROOT/train.py" --config "${plan[config]}")
  [[ -z ${BACKEND:-} ]] || SCRIPT+=(--distributed-backend "$BACKEND")
  SCRIPT+=("${SETTINGS[@]}" "${REST[@]}")
  check_config
}

check_config() {
  local said code=0
  local -x WORLD_SIZE=
  [[ ${plan[nproc]} == auto ]] || WORLD_SIZE=$((plan[nnodes] * plan[nproc]))
  said=$("$PYTHON" "${SCRIPT[@]}" --check 2>&1) || code=$?
  case $code in
    0)
      read_facts "$said"
      [[ -n ${plan[backend]:-} ]] || refuse env-missing "$PYTHON is no Python; correct PYTHON"
      ;;
    2) printf '%s\n' "$said" >&2 && exit 2 ;;
    *) refuse env-missing "$PYTHON cannot run train.py (${said##*$'\n'}); run make setup, or set PYTHON" ;;
  esac
}

# name=value lines, as train.py --check and the preflight print them, into the plan.
read_facts() { # <text>
  local name value
  while IFS='=' read -r name value; do
    [[ ! $name =~ ^[a-z_]+$ ]] || plan["$name"]=$value
  done <<<"$1"
}

print_plan() {
  local run=${plan[run_id]:-"(named by node rank 0)"} config=
  [[ -z ${plan[config]:-} || ${plan[config]} == - ]] || printf -v config '    %q' "${plan[config]}"
  print_row run "$run$config"
  print_row hosts "$(describe_hosts)"
  print_row ranks "$((plan[nnodes] * plan[nproc])) = $(count "${plan[nnodes]}" node) x ${plan[nproc]}, $(describe_backend)"
  print_row preflight "$(describe_preflight)"
  print_row logs "${LOG_DIR:-logs}/${plan[run_id]:-<run id>}/   (tail -f ${LOG_DIR:-logs}/node_*.log)"
}

print_row() { # <label> <text>
  local bold='' plain=''
  if [[ -t 2 && -z ${NO_COLOR:-} ]]; then bold=$'\e[1m' plain=$'\e[0m'; fi
  printf '%s%-9s%s  %s\n' "$bold" "$1" "$plain" "$2" >&2
}

count() { # <number> <noun> [<plural>]
  if (($1 == 1)); then echo "1 $2"; else echo "$1 ${3:-$2s}"; fi
}

describe_hosts() {
  local master=${plan[master]}:${plan[port]}
  if ((plan[nnodes] == 1)); then
    echo "$HOST (master, $master)"
  else
    echo "$master (master)  $HOST (this one, node rank ${plan[node_rank]} of ${plan[nnodes]})"
  fi
}

describe_backend() {
  local backend=${BACKEND:-${plan[backend]:-auto}}
  if [[ $backend == auto ]]; then
    if ((plan[gpus])); then backend=nccl; else backend=gloo; fi
  fi
  echo "$backend"
}

describe_preflight() {
  if [[ -n $DRY_RUN ]]; then
    echo "not run (--dry-run)"
  elif [[ -n ${SKIP_PREFLIGHT:-} ]]; then
    echo "not run (SKIP_PREFLIGHT)"
  else
    local verdict=ok
    ((plan[warnings] == 0)) || verdict=$(count "${plan[warnings]}" warning)
    echo "$(count "${plan[checks]}" check) on $(count "${plan[checked_nodes]}" node): $verdict in ${plan[seconds]} s"
  fi
}
