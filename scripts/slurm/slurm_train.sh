#!/usr/bin/env bash
# Train in a SLURM job on all of its nodes.
#
# usage: sbatch [SBATCH OPTIONS] scripts/slurm/slurm_train.sh [CONFIG] [key=value...] [-- ARGS...]
#
#   CONFIG     the config, a YAML file (default: config/local3.yaml)
#   key=value  settings that override the config
#   --dry-run  outside a job: show the sbatch command
#
# example: sbatch --nodes=4 --gpus-per-node=8 scripts/slurm/slurm_train.sh config/local3.yaml
#          under salloc: the same without sbatch
#
# By default, the job has 2 nodes with 2 GPUs each, 4 CPUs per GPU and 24 hours. sbatch's options
# override these; for CPUs use --cpus-per-gpu. Your site may need --partition, --account or --mem.
# Ranks per node: the first of --ntasks-per-node (if above 1), NPROC_PER_NODE, the number of GPUs.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-gpu=4
#SBATCH --time=24:00:00
#SBATCH --output=logs/slurm-%j.out
#
# 120 s before its time limit, the job saves a checkpoint and returns to the queue.
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
KIT_NAME=slurm_train.sh # the rest is the same in both: SLURM copies only one file

# sbatch sends the path without links. If a node lacks it, SLURM starts in /tmp; $PWD was typed.
if [[ $PWD == /tmp && ! -d ${SLURM_SUBMIT_DIR:-/} ]]; then
  cd -- "$(sed -zn 's/^PWD=//p' /proc/$$/environ | tr -d '\0')" 2>/dev/null || true
  [[ $PWD != /tmp ]] || { echo "$KIT_NAME: $(uname -n): there is no folder" \
    "$SLURM_SUBMIT_DIR, where the job was submitted; submit it from one that all nodes have," \
    "or give sbatch --chdir=FOLDER [dir-not-shared]" >&2 && exit 3; }
  export SLURM_SUBMIT_DIR=$PWD
fi

KIT_FILE=$([[ $0 != */slurm_script ]] || scontrol show job "${SLURM_JOB_ID:-}" 2>/dev/null |
  sed -n '/^ *Command=/{s///p; q}') || true # the file and its arguments: SLURM runs a copy
while [[ ! -e $KIT_FILE && $KIT_FILE == *' '* ]]; do KIT_FILE=${KIT_FILE% *}; done
[[ -e $KIT_FILE ]] || KIT_FILE=$0
find_lib() { readlink -e -- {"$1"/..,{"$1","$2"}{,/launch-kit}/scripts}/lib/launch.sh | sed q; }
KIT_LIB=$(find_lib "$(dirname -- "$(readlink -f -- "$KIT_FILE")")" "${SLURM_SUBMIT_DIR:-}" || true)
[[ $KIT_LIB ]] || { echo "$KIT_NAME: this copy cannot find scripts/lib; submit it from the" \
  "project's folder or the one containing launch-kit/ [env-missing]" >&2 && exit 3; }
source "$KIT_LIB"
run_command slurm_train "$@"
