#!/usr/bin/env bash
# Verify the set-up: links between nodes, known results, speeds. It ends with PASS or FAIL.
#
# usage: scripts/test_distributed.sh [N] [NODE...]
#
#   N                 processes on each node (default: one per GPU, or two without GPUs)
#   NODE              machines to test together over ssh, named as for launch_torchrun_auto.sh
#                     (default: those of the SLURM or PBS job, otherwise this machine)
#   -f FILE           read more machines from FILE, one per line
#   --quick           take less time: of the collectives, only the all-reduce is measured
#   --test basic|all  basic: only the known results, no speeds
#   --json FILE       write all results to FILE, on the first node
#
# example: scripts/test_distributed.sh 2
#          scripts/test_distributed.sh 8 node1 node2
#          salloc --nodes=4 --gpus-per-node=8 scripts/test_distributed.sh
#
# It runs in the project's folder, logs where you start it, and ignores TRAIN_SCRIPT, CONFIG_FLAG.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
KIT_NAME=test_distributed.sh KIT_ROOT=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}
KIT_HERE=$([[ $0 != */slurm_script ]] || scontrol show job "${SLURM_JOB_ID:-}" |
  sed -n '/^ *Command=/{s///; s/\.sh .*/.sh/; p; q}') || true # see scripts/launch.sh
KIT_HERE=$(dirname -- "$(readlink -f -- "${KIT_HERE:-$0}")")
source "$(readlink -e {"$KIT_HERE"{,/..},"$KIT_ROOT"{,/launch-kit}/scripts}/lib/launch.sh | sed q)"
run_command test_distributed "$@"
