#!/usr/bin/env bash
# Work out the SLURM job that a training run needs, and submit it.
#
# usage: scripts/submit_with_config.sh config=FILE num_gpus_train=N [num_gpus=N prepare=SCRIPT] \
#        [nodelist=LIST] [key=value...] [-- ARGS...]
#
#   config=FILE        the config, a YAML file
#   num_gpus_train=N   GPUs to train on: on one node if they fit, otherwise on several
#   num_gpus=N prepare=SCRIPT
#                      run your batch script first, in a separate job with N GPUs on one node
#   nodelist=LIST      the nodes to use
#   chain=N            submit N jobs, each of which resumes the run of the one before
#   cpus_per_gpu= mem_per_gpu=
#                      CPUs and memory for each GPU, instead of the batch script's
#   partition= time= account= qos= mem= dependency=
#                      passed to sbatch
#   --mail-user=NAME --mail-type=TYPE --exclude=NODES --constraint=FEATURES --reservation=NAME
#   --begin=TIME --deadline=TIME --comment=TEXT --licenses=LIST --switches=N --tmp=SIZE --wckey=KEY
#                      passed to sbatch, for both jobs
#   key=value          settings that override the config
#   --wait             follow the log to the job's end, and exit with its code
#
# example: scripts/submit_with_config.sh config=config/local3.yaml num_gpus_train=8 model.layers=8
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "$0")")/lib/launch.sh"
run_command submit_with_config "$@"
