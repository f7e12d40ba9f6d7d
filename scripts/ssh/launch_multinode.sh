#!/usr/bin/env bash
# Train on several machines through torch.distributed.launch, for scripts with --local-rank.
# Run it once.
#
# usage: scripts/ssh/launch_multinode.sh CONFIG NPROC NODE... [key=value...] [-- ARGS...]
#
#   --use-env  pass the local rank only as LOCAL_RANK, not also as --local-rank
#
# example: scripts/ssh/launch_multinode.sh config/local3.yaml 8 node1 node2
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
KIT_NAME=launch_multinode.sh KIT_ROOT=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}
KIT_HERE=$([[ $0 != */slurm_script ]] || scontrol show job "${SLURM_JOB_ID:-}" |
  sed -n '/^ *Command=/{s///; s/\.sh .*/.sh/; p; q}') || true # see scripts/launch.sh
KIT_HERE=$(dirname -- "$(readlink -f -- "${KIT_HERE:-$0}")")
source "$(readlink -e {"$KIT_HERE"{,/..},"$KIT_ROOT"{,/launch-kit}/scripts}/lib/launch.sh | sed q)"
run_command launch_multinode "$@"
