# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# What will run, where and how: decided here, once, before anything starts. An argument wins over
# the environment, that over the config, that over the default.
#
# plan[...]: config nproc nnodes node_rank master port run_id backend join_timeout checkpoint_dir,
# and from the preflight: gpus checks warnings seconds checked_nodes.

RANKS=()  # processes of each node; empty where all have plan[nproc]
SCRIPT=() # the training script and its arguments, the agent's last words

require_number() { # <what it is called> <value> <least> <most>
  [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] && (($2 >= $3 && $2 <= $4)) && return
  die 2 "$1 is ${2@Q}; give a whole number from $3 to $4"
}

require_word() { # <variable> <word allowed...>
  local value=${!1:-}
  [[ -z $value || ($value != *" "* && " ${*:2} " == *" $value "*) ]] ||
    die 2 "$1 is ${value@Q}; it can be ${*:2}"
}

# Takes from the environment what the arguments left open, and refuses what cannot be meant.
plan_settings() {
  : "${plan[nproc]=${NPROC_PER_NODE:-auto}}" "${plan[port]=${MASTER_PORT:-auto}}"
  : "${plan[nnodes]=1}" "${plan[node_rank]=0}"
  [[ ${plan[nproc]} == auto ]] || require_number "the number of processes" "${plan[nproc]}" 1 4096
  [[ ${plan[port]} == auto ]] || require_number "the port" "${plan[port]}" 1 65535
  require_number "the number of nodes" "${plan[nnodes]}" 1 100000
  require_number "the node rank" "${plan[node_rank]}" 0 $((plan[nnodes] - 1))
  ((plan[nnodes] > 1)) || : "${plan[master]=127.0.0.1}"
  [[ -n ${plan[master]=${MASTER_ADDR:-}} ]] ||
    die 2 "$(count "${plan[nnodes]}" node) but no address of the master; give MASTER_ADDR"
  # What the agent and the ranks read from the environment themselves.
  LOG_LEVEL=${plan[log_level]-${LOG_LEVEL:-}}
  require_word LOG_LEVEL DEBUG INFO WARNING ERROR
  require_word BACKEND nccl gloo
  require_word NCCL_PROFILE infiniband ethernet none
  require_number MAX_RESTARTS "${MAX_RESTARTS:-0}" 0 1000
  [[ ${MAX_RESTARTS:-0} == 0 || -z ${plan[engine]:-} ]] ||
    die 2 "MAX_RESTARTS is $MAX_RESTARTS, but ${plan[engine]} starts no rank again; leave it out"
  require_number GRACE "${GRACE:-30}" 0 86400
  plan_run_id
}

# For the scripts whose CONFIG may be left out. A training script of the user's needs none.
default_config() {
  local default=$ROOT/config/local3.yaml
  [[ -z ${TRAIN_SCRIPT:-} ]] || default=-
  : "${plan[config]=$default}"
}

# Nodes that are started by hand cannot agree on a run id, and on its port, before they meet.
by_hand() {
  [[ ${plan[nnodes]-1} == 1 ]] || : "${plan[port]=${MASTER_PORT:-29500}}"
}

# RUN_ID, else the scheduler's job, else a new one. Nodes started by hand take it from node rank 0.
plan_run_id() {
  plan[run_id]=${RUN_ID:-}
  if [[ -n ${plan[run_id]} ]]; then
    [[ ${plan[run_id]} =~ ^[A-Za-z0-9_][][A-Za-z0-9_.-]{0,127}$ ]] ||
      die 2 "RUN_ID is ${RUN_ID@Q}; use letters, digits and _ . - only, the first no . or -, at most 128"
    [[ ! ${plan[run_id]} =~ ^(latest|distributed_training|node_[0-9]+\.log)$ ]] ||
      die 2 "RUN_ID is ${RUN_ID@Q}, a name that the log folder needs itself; choose another"
  elif [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
    plan[run_id]=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  elif [[ -n ${SLURM_JOB_ID:-${PBS_JOBID:-}} ]]; then
    plan[run_id]=${SLURM_JOB_ID:-$PBS_JOBID}
  elif [[ ${plan[node_rank]-0} == 0 ]]; then
    printf -v "plan[run_id]" '%(%Y%m%d-%H%M%S)T-%04x' -1 $(($$ % 65536))
  fi
}

# Sets SCRIPT and, for train.py, has the config and the settings checked.
plan_script() {
  local words=() script=${TRAIN_SCRIPT:-$ROOT/train.py}
  [[ -n ${plan[config]+given} ]] || die 2 "no config; usage: $(usage_line)"
  [[ ${plan[config]} == - || -n ${CONFIG_FLAG:-} || -f ${plan[config]} ]] ||
    die 2 "there is no config ${plan[config]@Q}; give the path of a YAML file"
  if [[ ! $script -ef $ROOT/train.py ]]; then
    [[ ${plan[config]} == - ]] || words=("${CONFIG_FLAG:---config}" "${plan[config]}")
    SCRIPT=("$script" "${words[@]}" "${SETTINGS[@]}" "${REST[@]}")
    return
  fi
  words=(--config "${plan[config]}")
  [[ -z ${BACKEND:-} ]] || words+=(--distributed-backend "$BACKEND")
  SCRIPT=("$ROOT/train.py" "${words[@]}" "${SETTINGS[@]}" "${REST[@]}")
  check_config
}

check_config() {
  local said code=0
  local -x WORLD_SIZE=
  [[ " ${plan[nproc]} ${RANKS[*]} " == *" auto "* ]] || WORLD_SIZE=$(count_ranks)
  said=$("$PYTHON" "${SCRIPT[@]}" --check 2>&1) || code=$?
  if ((code == 2)); then printf '%s\n' "$said" >&2 && exit 2; fi
  ((code == 0)) ||
    refuse env-missing "$PYTHON cannot run train.py (${said##*$'\n'}); run make setup, or set PYTHON"
  read_facts "$said"
  [[ -n ${plan[backend]:-} ]] || refuse env-missing "$PYTHON is no Python; correct PYTHON"
}

# name=value lines, as train.py --check and the preflight print them, into the plan.
read_facts() { # <text>
  local name value
  while IFS='=' read -r name value; do
    [[ ! $name =~ ^[a-z_]+$ ]] || plan["$name"]=$value
  done <<<"$1"
}

print_plan() {
  local master=${plan[master]} logs=${LOG_DIR:-logs} run=${plan[run_id]} config=
  local each=${plan[nproc]}
  [[ $master != *:* ]] || master=[$master]
  master+=:${plan[port]}
  local hosts="${NODES[0]:-${plan[hosts]:-$HOST}} (master, $master)" backend=${BACKEND:-${plan[backend]:-auto}} checks verdict=ok
  [[ ${plan[config]:--} == - ]] || printf -v config '    %q' "${plan[config]}"
  if ((${#NODES[@]} > 1)); then
    hosts+=$(printf '  %s' "${NODES[@]:1}")
    each=$(printf '%s\n' "${RANKS[@]}" | sort -u)
    [[ $each != *$'\n'* ]] || each=$(tr ' ' , <<<"${RANKS[*]}")
  fi
  ((plan[nnodes] == 1 || ${#NODES[@]} > 0)) ||
    hosts="$master (master)  ${plan[hosts]-$HOST (this one, node rank ${plan[node_rank]} of ${plan[nnodes]})}"
  [[ $backend != auto || ${plan[gpus]} == 0 ]] || backend=nccl
  ((plan[warnings] == 0)) || verdict=$(count "${plan[warnings]}" warning)
  checks="$(count "${plan[checks]}" check) on $(count "${plan[checked_nodes]}" node)"
  checks+=": $verdict in ${plan[seconds]} s"
  [[ -z ${SKIP_PREFLIGHT:-} ]] || checks="not run (SKIP_PREFLIGHT)"
  [[ -z $DRY_RUN ]] || checks="not run (--dry-run)"
  print_row run "${run:-(named by node rank 0)}$config"
  print_row hosts "$hosts"
  print_row ranks "$(count_ranks) = $(count "${plan[nnodes]}" node) x $each, ${backend/auto/gloo}"
  [[ -z ${plan[forwarded]:-} ]] || print_row variables "${plan[forwarded]//$'\n'/ } go with it"
  print_row preflight "$checks"
  logs+=/${run:-<run id>}/
  [[ -n ${plan[engine]:-} ]] || logs+="   (tail -f $(quote_line "${LOG_DIR:-logs}")/node_*.log)"
  [[ -n ${plan[engine]:-} && -n ${TRAIN_SCRIPT:-} ]] || print_row logs "$logs" # else there are none
}

# All of them; they may differ from node to node.
count_ranks() {
  local number sum=0
  for number in "${RANKS[@]}"; do ((sum += number)); done
  echo $((sum ? sum : plan[nnodes] * plan[nproc]))
}

print_row() { # <label> <text>
  local bold='' plain=''
  if [[ -t 2 && -z ${NO_COLOR:-} ]]; then bold=$'\e[1m' plain=$'\e[0m'; fi
  printf '%s%-9s%s  %s\n' "$bold" "$1" "$plain" "$2" >&2
}

count() { # <number> <noun> [<plural>]
  if (($1 == 1)); then echo "1 $2"; else echo "$1 ${3:-$2s}"; fi
}
