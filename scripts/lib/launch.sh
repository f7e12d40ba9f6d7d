# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# The way of every launcher: plan, preflight, start. An entry script sources this with the name of
# its fan-out (local, ...), parses its arguments and calls launch.

FANOUT=$1

# shellcheck source=scripts/lib/common.sh
source "$LIB/common.sh"
# shellcheck source=scripts/lib/arguments.sh
source "$LIB/arguments.sh"
# shellcheck source=scripts/lib/scheduler.sh
source "$LIB/scheduler.sh"
# shellcheck source=scripts/lib/python.sh
source "$LIB/python.sh"
# shellcheck source=scripts/lib/plan.sh
source "$LIB/plan.sh"
# shellcheck source=scripts/lib/detach.sh
source "$LIB/detach.sh"
# shellcheck source=scripts/lib/local.sh
source "$LIB/$FANOUT.sh"

launch() {
  plan_settings
  choose_python
  plan_script
  launch_planned
}

# The second half, for a script that sets SCRIPT itself.
launch_planned() {
  fanout_check
  print_plan
  start_or_print
}

start_or_print() {
  if [[ -n $DRY_RUN ]]; then
    fanout_print
  else
    [[ -z ${LAUNCHER_RECORD:-} ]] || note_start
    fanout_start
  fi
}

# Sets COMMAND: the preflight of one node, wherever it is started.
preflight_command() { # <its options for the node's place, where it does not find that itself...>
  COMMAND=(
    env --chdir="$ROOT" PROGRAM="$PROGRAM" "$PYTHON" -m launcher.preflight "$@"
    --nnodes "${plan[nnodes]}" --run-id "${plan[run_id]}"
    --nproc "${plan[nproc]}" --cpu-nproc "${plan[cpu_nproc]:-1}"
    --master-addr "${plan[master]}" --port "${plan[port]}"
    --directory "$PWD" --log-dir "${LOG_DIR:-logs}" --checkpoint-dir "${plan[checkpoint_dir]:-}"
  )
  [[ -z $STRICT ]] || COMMAND+=(--strict)
  [[ -z $DRY_RUN && -z ${SKIP_PREFLIGHT:-} ]] || COMMAND+=(--no-checks)
  COMMAND+=(-- "${SCRIPT[@]}")
}

# After it, with the answers of several nodes: what differs between them.
compare_nodes() { # <what all of them have printed>
  local facts
  ((plan[nnodes] > 1)) && [[ -z $DRY_RUN && -z ${SKIP_PREFLIGHT:-} ]] || return 0
  facts=$(PROGRAM=$PROGRAM run_ours launcher.preflight --compare ${STRICT:+--strict} <<<"$1") || return
  read_facts "$facts"
}

# Sets COMMAND: what one node runs, in the working directory of the launch.
node_command() { # <agent's options for the node's place, where it does not find that itself...>
  local name variables=() RUN_ID=${plan[run_id]} LAUNCH_COMMAND
  LAUNCH_COMMAND=$(launch_line)
  local LAUNCHER=${plan[engine]:-}
  for name in RUN_ID LAUNCH_COMMAND LOG_LEVEL BACKEND GRACE LAUNCHER; do
    [[ -z ${!name:-} ]] || variables+=("$name=${!name}")
  done
  COMMAND=(
    env "${variables[@]}" "$PYTHON" "$ROOT/scripts/lib/agent.py" "$@"
    --nproc-per-node "${plan[nproc]}" --master-port "${plan[port]}"
  )
  if [[ -n $LAUNCHER ]]; then
    COMMAND+=(${plan[use_env]:+--use-env} "${SCRIPT[@]}")
    return
  fi
  COMMAND+=(--rdzv-conf "join_timeout=${plan[join_timeout]:-300}" --log-dir "${LOG_DIR:-logs}")
  [[ -z $RUN_ID ]] || COMMAND+=(--rdzv-id "$RUN_ID")
  ((${MAX_RESTARTS:-0} == 0)) || COMMAND+=(--max-restarts "$MAX_RESTARTS")
  COMMAND+=("${SCRIPT[@]}")
}

# What the user typed, with the variables that shaped it: the run is resumed by typing it again.
launch_line() {
  local name word words=() over_ssh=()
  ((${#NODES[@]} == 0)) || over_ssh=(SSH_OPTS FORWARD_ENV)
  for name in TRAIN_SCRIPT CONFIG_FLAG NPROC_PER_NODE BACKEND LOG_DIR MASTER_ADDR MASTER_PORT \
    MAX_RESTARTS GRACE LAUNCHER NCCL_PROFILE VENV CONDA_ENV MODULES "${over_ssh[@]}"; do
    [[ -z ${!name:-} ]] || words+=("$name=${!name}")
  done
  for word in "${LAUNCH_LINE[@]}"; do
    [[ $word == --dry-run || $word == resume=never ]] || words+=("$word")
  done
  quote_line "${words[@]}"
}
