#!/usr/bin/env bash
# Verify the set-up: environment, collectives with known answers, bandwidth, a verdict in one line.
#
# usage: scripts/test_distributed.sh [N]
#
#   N  processes to start (default: one per GPU, two where there is none)
#
# example: scripts/test_distributed.sh 2
#
# It runs in the project's folder; TRAIN_SCRIPT and CONFIG_FLAG have no part in it.
set -euo pipefail
LIB=$(dirname -- "$(readlink -f -- "$0")")/lib
[[ -r $LIB/launch.sh ]] || LIB=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/scripts/lib # a scheduler's copy
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh" local

main() {
  parse_arguments "nproc" "$@"
  ((${#SETTINGS[@]} == 0)) || die 2 "settings mean nothing here (${SETTINGS[0]@Q}); leave them out"
  plan[cpu_nproc]=2
  plan_settings
  choose_python
  cd -- "$ROOT"
  SCRIPT=(-m distributed.selftest "${REST[@]}")
  launch_planned
}
main "$@"
