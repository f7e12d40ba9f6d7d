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
PROGRAM=launch_multinode.sh
FILE=$([[ $0 != */slurm_script ]] || scontrol show job "${SLURM_JOB_ID:-}" |
  sed -n '/^ *Command=/{s///; s/\.sh .*/.sh/; p; q}') || true
HERE=$(dirname -- "$(readlink -f -- "${FILE:-$0}")") ROOT=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}
source "$(readlink -e -- {"$HERE"{,/..},"$ROOT"{,/launch-kit}/scripts}/lib/launch.sh | sed q)"
run_command launch_multinode "$@"
