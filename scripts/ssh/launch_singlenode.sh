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
case $0 in */slurm_script) FILE=$(scontrol show job "${SLURM_JOB_ID:-none}" 2>/dev/null | sed -n 's/\.sh .*/.sh/; s/^ *Command=//p' | tail -n 1) || FILE=$0 ;; *) FILE=$0 ;; esac # SLURM runs a copy
for LIB in "$(dirname -- "$(readlink -f -- "$FILE")")/../lib" "${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}"/{,launch-kit/}scripts/lib; do [[ ! -r $LIB/launch.sh ]] || break; done
[[ -r $LIB/launch.sh ]] || { echo "launch_singlenode.sh: this copy cannot find scripts/lib; submit it from the project's folder or the one containing launch-kit/ [env-missing]" >&2 && exit 3; }
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh"
run_command launch_singlenode "$@"
