#!/usr/bin/env bash
# Train on several machines through torch.distributed.launch, for scripts that need its --local-rank.
# Run it once.
#
# usage: scripts/ssh/launch_multinode.sh CONFIG NPROC NODE... [key=value...] [-- ARGS...]
#
#   --use-env  pass the local rank only as LOCAL_RANK, not also as --local-rank
#
# example: scripts/ssh/launch_multinode.sh config/local3.yaml 8 node1 node2
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
FILE=$([[ $0 != */slurm_script ]] || scontrol show job "${SLURM_JOB_ID:-}" | sed -n '/^ *Command=/{s///; s/\.sh .*/.sh/; p; q}') || true
HERE=$(dirname -- "$(readlink -f -- "${FILE:-$0}")") # SLURM runs a copy of FILE; if unknown, search the submit folder
for LIB in "$HERE/../lib" "${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}"/{,launch-kit/}scripts/lib; do [[ ! -r $LIB/launch.sh ]] || break; done
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh"
run_command launch_multinode "$@"
