#!/usr/bin/env bash
# Train here, wherever that is: on a plain machine, or on all nodes of a SLURM or PBS allocation.
#
# usage: scripts/run_ddp.sh [-n NPROC] [-c CONFIG] [-l LOG_LEVEL] [key=value...] [-- ARGS...]
#
#   -n, --num-gpus NPROC        processes to start (default: one per GPU, one where there is none)
#   -c, --config CONFIG         the configuration, a YAML file (default: config/local3.yaml)
#   --config-path DIR --config-name NAME
#                               the same in two parts: DIR/NAME.yaml
#   -l, --log-level LOG_LEVEL   DEBUG, INFO, WARNING or ERROR
#   key=value                   settings that replace the config's
#
# example: scripts/run_ddp.sh -n 4 -c config/local3.yaml train.max_steps=100
set -euo pipefail
LIB=$(dirname -- "$(readlink -f -- "$0")")/lib
[[ -r $LIB/launch.sh ]] || LIB=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/scripts/lib # a scheduler's copy
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh" local

main() {
  OPTIONS=(
    ["-n"]=nproc ["--num-gpus"]=nproc
    ["-c"]=config ["--config"]=config ["--config-path"]=config_path ["--config-name"]=config_name
    ["-l"]=log_level ["--log-level"]=log_level
  )
  parse_arguments "" "$@"
  join_config
  default_config
  if [[ -n ${SLURM_JOB_ID:-} ]] && ! in_slurm_step; then
    choose_python
    plan_from_job scripts/run_ddp.sh
    # shellcheck source=scripts/lib/srun.sh
    source "$LIB/srun.sh"
  elif [[ -r ${PBS_NODEFILE:-} && -n $(sort -u -- "$PBS_NODEFILE" | sed 1d) ]]; then
    choose_python
    # shellcheck source=scripts/lib/ssh.sh
    source "$LIB/ssh.sh"
    plan_from_nodefile
  else
    refuse_many_nodes
    warn_on_login_node
  fi
  launch
}

join_config() {
  local folder=${plan[config_path]:-} name=${plan[config_name]:-}
  [[ -n $folder$name ]] || return 0
  [[ -n $folder && -n $name ]] ||
    die 2 "--config-path and --config-name go together; give both, or --config FILE"
  plan[config]=$folder/${name%.yaml}.yaml
}
main "$@"
