#!/usr/bin/env bash
# Verify a SLURM cluster in a separate job: the nodes together, a training run, and its resume.
#
# usage: scripts/test_distributed_integration.sh [SALLOC OPTIONS]
#
#   SALLOC OPTIONS  the job's size and place (default: two nodes, for 20 minutes)
#   --dry-run       as the first option: print the command
#
# example: scripts/test_distributed_integration.sh --nodes=2 --gpus-per-node=8 --partition=gpu
#
# It waits for the job, shows its output, and exits with the code of the first failure.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "$0")")/lib/launch.sh"

main() {
  local salloc=(salloc --nodes=2 --time=20)
  case ${1:-} in
    -h | --help | --version) run_command "" "$@" ;;
    --dry-run) salloc+=("${@:2}" "$0") && echo "${salloc[*]@Q}" && exit ;;
  esac
  if [[ -z ${SLURM_JOB_ID:-} ]]; then
    type -P salloc >/dev/null ||
      refuse "salloc is not installed here; use a login node, or test_distributed.sh"
    sinfo >/dev/null || refuse "sinfo failed (see above); run this script where sinfo works"
    exec "${salloc[@]}" "$@" "$0"
  fi
  (($# == 0)) || die 2 "$1: this job already has its size; omit the options [config-invalid]"
  unset TRAIN_SCRIPT
  (run_command test_distributed_integration)

  local steps train=("$KIT_ROOT/scripts/slurm/slurm_train.sh" "$KIT_ROOT/config/local3.yaml")
  export RUN_ID=integration-$SLURM_JOB_ID
  for steps in 20 40; do # the second one resumes
    "${train[@]}" "train.max_steps=$steps" train.global_batch_size=null train.batch_size=4
  done
  echo "PASS       the nodes work together; training and resuming worked"
}
main "$@"
