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
FILE=$([[ $0 != */slurm_script ]] || scontrol show job "${SLURM_JOB_ID:-}" | sed -n '/^ *Command=/{s///; s/\.sh .*/.sh/; p; q}') || true
HERE=$(dirname -- "$(readlink -f -- "${FILE:-$0}")") # SLURM runs a copy of FILE; if unknown, search the submit folder
for LIB in "$HERE/../lib" "${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}"/{,launch-kit/}scripts/lib; do [[ ! -r $LIB/launch.sh ]] || break; done
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh"
run_command launch_singlenode "$@"
