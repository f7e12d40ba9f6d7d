#!/usr/bin/env bash
# Work out what a training needs of SLURM, and submit it.
#
# usage: scripts/submit_with_config.sh config=FILE num_gpus_train=N [num_gpus=N prepare=SCRIPT] [nodelist=LIST] [key=value...] [-- ARGS...]
#
#   config=FILE        the configuration, a YAML file
#   num_gpus_train=N   GPUs to train on: of one node where it has so many, else of several
#   num_gpus=N prepare=SCRIPT
#                      first a job of its own for a batch script of yours, with so many GPUs of a node
#   nodelist=LIST      the nodes to take
#   partition= time= account= qos= mem= dependency=
#                      for sbatch
#   key=value          settings that replace the config's
#   --wait             follow the log to the job's end, and leave with its exit code
#
# example: scripts/submit_with_config.sh config=config/local3.yaml num_gpus_train=8 train.max_steps=100
set -euo pipefail
LIB=$(dirname -- "$(readlink -f -- "$0")")/lib
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh"

main() {
  OPTIONS=(["--wait"]='!wait')
  SCHEDULED=1
  parse_arguments "" "$@"
  choose_python
  start_words submit --usage="$(usage_line)"
  exec "${COMMAND[@]}"
}
main "$@"
