#!/usr/bin/env bash
# Train in a PBS job (PBS Pro, OpenPBS, Torque) on all of its nodes, over ssh.
#
# usage: qsub [QSUB OPTIONS] -- $PWD/scripts/pbs/pbs_train.sh [CONFIG] [key=value...] [-- ARGS...]
#        qsub [QSUB OPTIONS] scripts/pbs/pbs_train.sh
#
#   CONFIG     a YAML file (default: config/local3.yaml). The second form takes -v CONFIG=FILE and
#              reads the #PBS lines; Torque supports only this form, with -F "CONFIG key=value"
#   --dry-run  outside a job: show the qsub command
#
# example: qsub -l select=4:ncpus=64:ngpus=8 -l walltime=24:00:00 -j oe -o logs/ -N train -- \
#          $PWD/scripts/pbs/pbs_train.sh my.yaml
#
# Give the job's size to qsub (Torque: -l nodes=4:ppn=8). qdel, the walltime and qrerun let the
# ranks save, if the queue's kill_delay is at least GRACE + 10 seconds. In the first form, so does
# qsig -s USR1. Processes per node: the first of NPROC_PER_NODE, the job's mpiprocs or ngpus, the
# node's lines in the node file (if more than one), the number of GPUs.
#PBS -N train
#PBS -l walltime=24:00:00
#PBS -j oe
#PBS -o logs/
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
[[ ${PBS_ENVIRONMENT:-} == PBS_INTERACTIVE ]] || cd -- "${PBS_O_WORKDIR:-.}"
[[ -z ${PBS_O_WORKDIR:-} ]] || mkdir -p logs 2>/dev/null || true # PBS writes the output there
KIT_NAME=pbs_train.sh KIT_FOLDER=$(dirname -- "$(readlink -f -- "$0")")
KIT_LIB=$(readlink -e -- {"$KIT_FOLDER/..","$PWD"{,/launch-kit}/scripts}/lib/launch.sh || true)
[[ $KIT_LIB ]] || { echo "$KIT_NAME: this copy cannot find scripts/lib; submit it from the" \
  "project's folder or the one containing launch-kit/ [env-missing]" >&2 && exit 3; }
source "${KIT_LIB%%$'\n'*}"
run_command pbs_train "$@"
