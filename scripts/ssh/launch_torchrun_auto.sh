#!/usr/bin/env bash
# Train on several machines. Run it once: it starts every node over ssh.
#
# usage: scripts/ssh/launch_torchrun_auto.sh CONFIG NPROC NODE... [key=value...] [-- ARGS...]
#
# example: scripts/ssh/launch_torchrun_auto.sh config/local3.yaml 8 node1 node2
set -euo pipefail
LIB=$(dirname -- "$(readlink -f -- "$0")")/../lib
[[ -r $LIB/launch.sh ]] || LIB=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/scripts/lib # a scheduler's copy
[[ -r $LIB/launch.sh ]] || LIB=${LIB%/*/*}/launch-kit/scripts/lib                  # make init
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh"

main() {
  OPTIONS=(["-f"]=hostfile)
  parse_arguments "config nproc nodes..." "$@"
  launch ssh
}
main "$@"
