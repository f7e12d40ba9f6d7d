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
KIT_NAME=run_ddp.sh KIT_ROOT=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}
KIT_HERE=$([[ $0 != */slurm_script ]] || scontrol show job "${SLURM_JOB_ID:-}" |
  sed -n '/^ *Command=/{s///; s/\.sh .*/.sh/; p; q}') || true # see scripts/launch.sh
KIT_HERE=$(dirname -- "$(readlink -f -- "${KIT_HERE:-$0}")")
source "$(readlink -e {"$KIT_HERE"{,/..},"$KIT_ROOT"{,/launch-kit}/scripts}/lib/launch.sh | sed q)"
run_command run_ddp "$@"
