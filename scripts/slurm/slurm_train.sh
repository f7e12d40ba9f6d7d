#!/usr/bin/env bash
# Train in a SLURM job, on all of its nodes.
#
# usage: sbatch [SBATCH OPTIONS] scripts/slurm/slurm_train.sh [CONFIG] [key=value...] [-- ARGS...]
#
#   CONFIG     the configuration, a YAML file (default: config/local3.yaml)
#   key=value  settings that replace the config's
#
# example: sbatch --nodes=4 --gpus-per-node=8 scripts/slurm/slurm_train.sh config/local3.yaml
#          and inside an allocation of salloc the same without sbatch
#
# What the job asks for. Edit it, or say it to sbatch, which wins. Ranks per node: the tasks per node
# where they are more than one, else the GPUs.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --time=24:00:00
#SBATCH --output=logs/slurm-%j.out
#
# So long before its time is over the job saves, and goes to the queue again.
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
LIB=$(dirname -- "$(readlink -f -- "$0")")/../lib
if [[ ! -r $LIB/launch.sh ]]; then # sbatch runs a copy of this file, but knows where it lay
  LIB=$(scontrol show job "${SLURM_JOB_ID:-}" 2>/dev/null | sed -n '/^ *Command=/{s///; s|/slurm/slurm_train.*|/lib|p; q}') || true
  [[ -r $LIB/launch.sh ]] || LIB=${SLURM_SUBMIT_DIR:-}/scripts/lib
  [[ -r $LIB/launch.sh ]] || {
    echo "slurm_train.sh: this is a copy, and finds no scripts/lib; submit it in the project's folder" >&2
    exit 2
  }
fi
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh"

PROGRAM=slurm_train.sh # whatever SLURM calls its copy

main() {
  SCHEDULED=1
  parse_arguments config "$@"
  default_config
  PLAN[batch-script]=scripts/slurm/slurm_train.sh
  launch srun
}
main "$@"
