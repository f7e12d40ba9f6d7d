#!/usr/bin/env bash
# Train on this machine.
#
# usage: scripts/ssh/launch_singlenode.sh CONFIG [NPROC] [key=value...] [-- ARGS...]
#
#   CONFIG     the config, a YAML file
#   NPROC      number of processes (default: one per GPU, or one without GPUs)
#   key=value  settings that override the config
#
# example: scripts/ssh/launch_singlenode.sh config/local3.yaml 2 train.max_steps=100
set -euo pipefail
LIB=$(dirname -- "$(readlink -f -- "$0")")/../lib
[[ -r $LIB/launch.sh ]] || LIB=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/scripts/lib # a scheduler's copy
[[ -r $LIB/launch.sh ]] || LIB=${LIB%/*/*}/launch-kit/scripts/lib                  # make init
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh"

main() {
  parse_arguments "config nproc" "$@"
  launch local
}
main "$@"
