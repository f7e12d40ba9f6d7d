#!/usr/bin/env bash
# Verify the set-up: environment, collectives with known results, bandwidth. Ends with PASS or FAIL.
#
# usage: scripts/test_distributed.sh [N] [NODE...]
#
#   N        processes on each node (default: one per GPU, or two without GPUs)
#   NODE     machines to test together over ssh, named as for launch_torchrun_auto.sh
#            (default: this machine)
#   -f FILE  read more machines from FILE, one per line
#
# example: scripts/test_distributed.sh 2
#          scripts/test_distributed.sh 8 node1 node2
#
# It runs in the project's folder, writes its logs where you start it, and ignores TRAIN_SCRIPT and
# CONFIG_FLAG.
set -euo pipefail
LIB=$(dirname -- "$(readlink -f -- "$0")")/lib
[[ -r $LIB/launch.sh ]] || LIB=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/scripts/lib # a scheduler's copy
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh"

main() {
  OPTIONS=(["-f"]=hostfile)
  parse_arguments "nproc nodes..." "$@"
  ((${#SETTINGS[@]} == 0)) || die 2 "settings mean nothing here (${SETTINGS[0]@Q}); leave them out"
  PLAN[cpu_nproc]=2 PLAN[module]=distributed.selftest
  launch local
}
main "$@"
