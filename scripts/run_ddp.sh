#!/usr/bin/env bash
# Train wherever you are: on a plain machine, or on all nodes of a SLURM or PBS allocation.
#
# usage: scripts/run_ddp.sh [-n NPROC] [-c CONFIG] [-l LOG_LEVEL] [key=value...] [-- ARGS...]
#
#   -n, --num-gpus NPROC        number of processes (default: one per GPU, or one without GPUs)
#   -c, --config CONFIG         the config, a YAML file (default: config/local3.yaml)
#   --config-path DIR --config-name NAME
#                               the same in two parts: DIR/NAME.yaml; a TRAIN_SCRIPT with
#                               @hydra.main gets both unchanged
#   -l, --log-level LOG_LEVEL   DEBUG, INFO, WARNING or ERROR
#   key=value                   settings that override the config
#
# example: scripts/run_ddp.sh -n 4 -c config/local3.yaml train.max_steps=100
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
case $0 in */slurm_script) FILE=$(scontrol show job "${SLURM_JOB_ID:-none}" 2>/dev/null | sed -n 's/\.sh .*/.sh/; s/^ *Command=//p' | tail -n 1) || FILE=$0 ;; *) FILE=$0 ;; esac # SLURM runs a copy
for LIB in "$(dirname -- "$(readlink -f -- "$FILE")")/lib" "${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}"/{,launch-kit/}scripts/lib; do [[ ! -r $LIB/launch.sh ]] || break; done
[[ -r $LIB/launch.sh ]] || { echo "run_ddp.sh: this copy cannot find scripts/lib; submit it from the project's folder or the one containing launch-kit/ [env-missing]" >&2 && exit 3; }
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh"
run_command run_ddp "$@"
