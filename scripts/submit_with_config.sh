#!/usr/bin/env bash
# Work out what a training needs of SLURM, and submit it.
#
# usage: scripts/submit_with_config.sh config=FILE num_gpus_train=N [num_gpus=N prepare=SCRIPT] [nodelist=LIST] [key=value...] [-- ARGS...]
#
#   config=FILE        the configuration, a YAML file
#   num_gpus_train=N   GPUs to train on: of one node where it has so many, else of several
#   num_gpus=N prepare=SCRIPT
#                      first a job of its own for a batch script of yours, with so many GPUs of a node
#   nodelist=LIST      the nodes to take
#   partition= time= account= qos= mem= dependency=
#                      for sbatch
#   key=value          settings that replace the config's
#   --wait             follow the log to the job's end, and leave with its exit code
#
# example: scripts/submit_with_config.sh config=config/local3.yaml num_gpus_train=8 train.max_steps=100
set -euo pipefail
LIB=$(dirname -- "$(readlink -f -- "$0")")/lib
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh" srun

OWN=(config num_gpus_train num_gpus prepare nodelist partition time account qos mem dependency)
COMMON=() # sbatch's options for every job

main() {
  # shellcheck disable=SC2034 # for parse_arguments
  OPTIONS=(["--wait"]='!wait')
  SCHEDULED=1
  parse_arguments "" "$@"
  choose_python
  take_own_settings
  plan_allocation
  plan_settings
  plan_script
  [[ -n $DRY_RUN ]] || mkdir -p -- logs # sbatch fails silently without
  local name
  for name in partition account qos mem time; do
    [[ -z ${plan[$name]:-} ]] || COMMON+=("--$name=${plan[$name]}")
  done
  submit_all
}

# Moves our own settings into the plan. Those of the training script have a section and a dot, or
# are among the few that train.py knows without.
take_own_settings() {
  local setting name others=()
  for setting in "${SETTINGS[@]}"; do
    name=${setting%%=*}
    if [[ " ${OWN[*]} " == *" $name "* ]]; then
      plan[$name]=${setting#*=}
    else
      [[ $name == *.* || " seed task resume " == *" $name "* || -n ${TRAIN_SCRIPT:-} ]] ||
        die 2 "unknown setting ${name@Q}; $(suggest "$name" "${OWN[@]}")"
      others+=("$setting")
    fi
  done
  SETTINGS=("${others[@]}")
  [[ -n ${plan[num_gpus_train]:-} ]] || die 2 "no num_gpus_train; usage: $(usage_line)"
  require_number num_gpus_train "${plan[num_gpus_train]}" 1 100000
  [[ -n ${plan[num_gpus]:-} ]] || plan[num_gpus]=0
  require_number num_gpus "${plan[num_gpus]}" 0 100000
  [[ ${plan[num_gpus]} == 0 || -n ${plan[prepare]:-} ]] ||
    die 2 "num_gpus is for a script that prepares the training; give prepare=SCRIPT too"
}

suggest() { # <word> <known word...>
  local near
  near=$(nearest "$@")
  echo "${near:+did you mean $near? }known here: ${*:2}, and the config's own"
}

# How many nodes, and GPUs on each: as few nodes as can be, and all alike.
plan_allocation() {
  local gpus=${plan[num_gpus_train]} most nodes=1 names
  most=$(most_gpus_of_a_node)
  ((most > 0)) || refuse too-few-gpus "sinfo shows no GPUs${plan[partition]:+ in partition ${plan[partition]}}; choose another partition"
  while ((gpus % nodes != 0 || gpus / nodes > most)); do ((nodes += 1)); done
  plan[nnodes]=$nodes
  plan[nproc]=$((gpus / nodes))
  plan[master]="the job's first node"
  if ((plan[nproc] == most)); then plan[exclusive]=1; fi
  names=$(run_ours distributed.hostlist expand "${plan[nodelist]:-any}") || exit
  if ((nodes == 1)) && [[ $names == *$'\n'* ]]; then
    echo "$PROGRAM: warning: $(count "$gpus" GPU) fit on one node; nodelist=${plan[nodelist]} is left aside" >&2
    plan[nodelist]=
  fi
}

most_gpus_of_a_node() {
  local words=(-h -N -o %G) said each most=0
  [[ -z ${plan[partition]:-} ]] || words+=(-p "${plan[partition]}")
  type -P sinfo >/dev/null || refuse env-missing "there is no sinfo here; submit from a login node"
  said=$(sinfo "${words[@]}") || refuse env-missing "sinfo fails, see above; submit where SLURM answers"
  for each in $said; do # such as gpu:a100:8(S:0-1)
    if [[ $each =~ gpu:([^:,\(]+:)?([0-9]+) ]] && ((BASH_REMATCH[2] > most)); then most=${BASH_REMATCH[2]}; fi
  done
  echo "$most"
}

submit_all() {
  local after=${plan[dependency]:-} script=scripts/slurm/slurm_train.sh words=()
  ((plan[nnodes] > 1)) || script=scripts/slurm/slurm_train_single_node.sh
  [[ $script -ef $ROOT/$script ]] || script=$ROOT/$script
  words=(--nodes="${plan[nnodes]}" --gpus-per-node="${plan[nproc]}")
  [[ -z ${plan[nodelist]:-} ]] || words+=(--nodelist="${plan[nodelist]}")
  [[ -z ${plan[exclusive]:-} ]] || words+=(--exclusive)
  words+=("$script" "${plan[config]}" "${SETTINGS[@]}")
  ((${#REST[@]} == 0)) || words+=(-- "${REST[@]}")
  [[ -n $DRY_RUN ]] || refuse_unless_possible "${words[@]}"
  if [[ -n ${plan[prepare]:-} ]]; then
    submit --nodes=1 --gpus-per-node="${plan[num_gpus]}" --output=logs/slurm-%j.out \
      ${after:+--dependency="$after"} "${plan[prepare]}" "${plan[config]}"
    after=afterok:$JOB
  fi
  submit ${after:+--dependency="$after" --kill-on-invalid-dep=yes} ${plan[wait]:+--wait} "${words[@]}"
  [[ -z ${plan[wait]:-} || -n $DRY_RUN ]] || follow "${after#afterok:}"
}

# Before anything is queued, for SLURM keeps a job that can never start.
refuse_unless_possible() { # <sbatch's options, script and arguments...>
  local said
  said=$(sbatch --test-only "${COMMON[@]}" "$@" 2>&1) ||
    die 3 "$(count "${plan[nnodes]}" node) x ${plan[nproc]} GPUs: ${said##*$'\n'}; see sinfo, and ask for what there is"
}

# Prints the command, runs it and sets JOB.
submit() { # <sbatch's options, script and arguments...>
  local command=(sbatch --parsable "${COMMON[@]}" "$@")
  JOB=JOBID
  print_row submit "$(quote_line "${command[@]}")"
  [[ -z $DRY_RUN ]] || return 0
  exec {SAID}< <(exec "${command[@]}")
  SBATCH=$!
  read -r JOB <&"$SAID" || die 3 "sbatch refused the job, see above"
  print_row job "$JOB    (tail -f logs/slurm-$JOB.out, scancel $JOB)"
}

# sbatch --wait leaves with the job's code.
follow() { # <the job before it, if there is one>
  local code=0
  tail --pid="$SBATCH" --follow=name --retry --lines=+1 "logs/slurm-$JOB.out" 2>/dev/null &
  wait "$SBATCH" || code=$?
  wait $! || true
  [[ -e logs/slurm-$JOB.out ]] ||
    die $((code ? code : 1)) "job $JOB did not start${1:+, for job $1 failed; see logs/slurm-$1.out}"
  exit "$code"
}
main "$@"
