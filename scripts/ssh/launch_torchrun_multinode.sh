#!/usr/bin/env bash
# Train on several machines. Run it by hand on each of them.
#
# usage: scripts/ssh/launch_torchrun_multinode.sh CONFIG NPROC NNODES NODE_RANK MASTER_ADDR \
#        [MASTER_PORT] [key=value...] [-- ARGS...]
#
#   CONFIG       the config, a YAML file, the same on every machine
#   NPROC        processes on each machine
#   NNODES       number of machines
#   NODE_RANK    this machine's number, from 0
#   MASTER_ADDR  address of the machine with node rank 0
#   MASTER_PORT  a free port there (default: 29500)
#   key=value    settings that override the config
#
# example: scripts/ssh/launch_torchrun_multinode.sh config/local3.yaml 8 2 0 10.0.0.1
#          and on the second machine, the same with 1 instead of 0
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
KIT_NAME=launch_torchrun_multinode.sh KIT_ROOT=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}
KIT_HERE=$([[ $0 != */slurm_script ]] || scontrol show job "${SLURM_JOB_ID:-}" |
  sed -n '/^ *Command=/{s///; s/\.sh .*/.sh/; p; q}') || true # see scripts/launch.sh
KIT_HERE=$(dirname -- "$(readlink -f -- "${KIT_HERE:-$0}")")
source "$(readlink -e {"$KIT_HERE"{,/..},"$KIT_ROOT"{,/launch-kit}/scripts}/lib/launch.sh | sed q)"
run_command launch_torchrun_multinode "$@"
