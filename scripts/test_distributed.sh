#!/usr/bin/env bash
# Verify the set-up: environment, collectives with known answers, bandwidth, a verdict in one line.
#
# usage: scripts/test_distributed.sh [N] [NODE...]
#
#   N        processes to start, on each node (default: one per GPU, two where there is none)
#   NODE     machines to verify together, over ssh, as launch_torchrun_auto.sh is given them
#            (default: this one)
#   -f FILE  more of them, one a line
#
# example: scripts/test_distributed.sh 2
#          scripts/test_distributed.sh 8 node1 node2
#
# It runs in the project's folder, and writes its logs where you start it. TRAIN_SCRIPT and
# CONFIG_FLAG have no part in it.
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
