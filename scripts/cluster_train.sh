#!/usr/bin/env bash
# Train on one node of a cluster or on several: by hand on each node, or once under srun. It tests
# the node first.
#
# usage: scripts/cluster_train.sh [CONFIG] [NUM_NODES] [NODE_RANK] [MASTER_ADDR] [MASTER_PORT] \
#        [key=value...] [-- ARGS...]
#
#   CONFIG       the config, a YAML file (default: config/local3.yaml)
#   NUM_NODES    number of nodes (default: 1; under srun: from the step)
#   NODE_RANK    this node's number, from 0 (under srun: from the step)
#   MASTER_ADDR  address of node rank 0 (under srun: the first node of the step)
#   MASTER_PORT  a free port there (default: from the run id; several nodes by hand: 29500)
#   key=value    settings that override the config
#
# example: scripts/cluster_train.sh config/local3.yaml 2 0 10.0.0.1
#          srun --ntasks-per-node=1 scripts/cluster_train.sh config/local3.yaml
#
# The terminal's output is kept in logs/distributed_training/; the newest is latest_node<rank>.log.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
KIT_NAME=cluster_train.sh KIT_ROOT=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}
KIT_HERE=$([[ $0 != */slurm_script ]] || scontrol show job "${SLURM_JOB_ID:-}" |
  sed -n '/^ *Command=/{s///; s/\.sh .*/.sh/; p; q}') || true # see scripts/launch.sh
KIT_HERE=$(dirname -- "$(readlink -f -- "${KIT_HERE:-$0}")")
source "$(readlink -e {"$KIT_HERE"{,/..},"$KIT_ROOT"{,/launch-kit}/scripts}/lib/launch.sh | sed q)"
run_command cluster_train "$@"
