#!/usr/bin/env bash
# Train in a PBS job (PBS Pro, OpenPBS, Torque), on all of its nodes, over ssh.
#
# usage: qsub [QSUB OPTIONS] scripts/pbs/pbs_train.sh
#
#   -v CONFIG=FILE        the configuration, a YAML file (default: config/local3.yaml)
#   -F "CONFIG key=value"  the same and settings, where qsub knows -F (OpenPBS, Torque)
#
# example: qsub -l select=4:ngpus=8 -v CONFIG=config/local3.yaml scripts/pbs/pbs_train.sh
#
# What the job asks for. Edit it, or say it to qsub, which wins. Processes per node: NPROC_PER_NODE,
# else as often as a node stands in the node file, where that is more than once, else its GPUs.
#PBS -N train
#PBS -l select=2:ncpus=8:ngpus=2
#PBS -l walltime=24:00:00
#PBS -j oe
set -euo pipefail
cd -- "${PBS_O_WORKDIR:-.}"
LIB=$(dirname -- "$(readlink -f -- "$0")")/../lib
[[ -r $LIB/launch.sh ]] || LIB=$PWD/scripts/lib # PBS runs a copy of this file
[[ -r $LIB/launch.sh ]] || {
  echo "pbs_train.sh: this is a copy, and finds no scripts/lib; submit it in the project's folder" >&2
  exit 2
}
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh" ssh

main() {
  parse_arguments config "$@"
  [[ -z ${CONFIG:-} ]] || : "${plan[config]=$CONFIG}"
  default_config
  choose_python
  plan_from_nodefile
  [[ -e $0 && $0 -ef $ROOT/scripts/pbs/pbs_train.sh ]] || name_submission "$@"
  launch
}

# What was typed, as far as one can tell: with the variables before it, which -V takes along.
name_submission() { # <argument...>
  local word again=()
  for word in "$@"; do
    [[ $word == --dry-run || $word == resume=never ]] || again+=("$word")
  done
  LAUNCH_LINE=(${CONFIG:+"CONFIG=$CONFIG"} qsub -V)
  ((${#again[@]} == 0)) || LAUNCH_LINE+=(-F "$(quote_line "${again[@]}")")
  LAUNCH_LINE+=(scripts/pbs/pbs_train.sh)
}
main "$@"
