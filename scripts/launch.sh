#!/usr/bin/env bash
# Run your own script with torchrun's arguments: type this command instead of torchrun.
#
# usage: scripts/launch.sh [TORCHRUN OPTIONS] [--hosts LIST|FILE|job] SCRIPT [ARGS...]
#
#   --nproc-per-node N    processes on each machine: a number, gpu, cpu or auto (default: 1; with
#                         --hosts: one per GPU)
#   --hosts LIST          start it on these machines over ssh, from here: node1,node2:4,gpu[01-08]
#   --hosts FILE          the same; FILE has one machine per line
#   --hosts job           on all nodes of the SLURM or PBS job: in its batch script or shell, or
#                         submitted directly with sbatch or qsub
#   --via pdsh            with pdsh instead of ssh
#   -m, --module          SCRIPT is a module: -m pkg.mod
#   --no-python           SCRIPT is any program
#   --nnodes N --node-rank R --master-addr ADDR --master-port PORT
#                         several machines: run it on each of them, or once under srun
#   --nnodes N --rdzv-backend c10d --rdzv-endpoint ADDR:PORT
#                         the same on each of them: node rank 0 is the machine that has ADDR
#   SCRIPT                a Python file, or a folder or zip that contains __main__.py
#   ARGS                  everything after SCRIPT is passed to it unchanged, without a `--`
#   torchrun's other options work, too; options of this command go before SCRIPT.
#
# example: scripts/launch.sh --nproc-per-node 4 train.py config/x.py --batch_size=32
#          scripts/launch.sh --hosts node1,node2 --nproc-per-node 8 train.py config/x.py
#          sbatch --nodes=4 --gpus-per-node=8 scripts/launch.sh --hosts job train.py config/x.py
#          pip installs it as: launch --nproc-per-node 4 train.py config/x.py --batch_size=32
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
KIT_NAME=launch.sh KIT_ROOT=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}
# SLURM and PBS run a copy of this file. SLURM knows the original; else search the submit folder.
KIT_HERE=$([[ $0 != */slurm_script ]] || scontrol show job "${SLURM_JOB_ID:-}" |
  sed -n '/^ *Command=/{s///; s/\.sh .*/.sh/; p; q}') || true
KIT_HERE=$(dirname -- "$(readlink -f -- "${KIT_HERE:-$0}")")
source "$(readlink -e {"$KIT_HERE"{,/..},"$KIT_ROOT"{,/launch-kit}/scripts}/lib/launch.sh | sed q)"
run_command launch "$@"
