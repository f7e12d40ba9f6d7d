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
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
KIT_NAME=launch_singlenode.sh KIT_ROOT=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}
KIT_HERE=$([[ $0 != */slurm_script ]] || scontrol show job "${SLURM_JOB_ID:-}" |
  sed -n '/^ *Command=/{s///; s/\.sh .*/.sh/; p; q}') || true # see scripts/launch.sh
KIT_HERE=$(dirname -- "$(readlink -f -- "${KIT_HERE:-$0}")")
source "$(readlink -e {"$KIT_HERE"{,/..},"$KIT_ROOT"{,/launch-kit}/scripts}/lib/launch.sh | sed q)"
run_command launch_singlenode "$@"
