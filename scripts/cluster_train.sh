#!/usr/bin/env bash
# Train on one node of a cluster, or on several: by hand on each, or once under srun. The health
# of the node is checked first.
#
# usage: scripts/cluster_train.sh [CONFIG] [NUM_NODES] [NODE_RANK] [MASTER_ADDR] [MASTER_PORT] [key=value...] [-- ARGS...]
#
#   CONFIG       the configuration, a YAML file (default: config/local3.yaml)
#   NUM_NODES    nodes in all (default: 1; under srun: the step's)
#   NODE_RANK    this node's number, from 0 (under srun: the step's)
#   MASTER_ADDR  address of node 0 (under srun: the step's first node)
#   MASTER_PORT  a free port on node 0 (default: from the run id; by hand on several nodes 29500)
#   key=value    settings that replace the config's
#
# example: scripts/cluster_train.sh config/local3.yaml 2 0 10.0.0.1
#          srun --ntasks-per-node=1 scripts/cluster_train.sh config/local3.yaml
#
# What the terminal shows is kept in logs/distributed_training/, newest: latest_node<rank>.log.
set -euo pipefail
LIB=$(dirname -- "$(readlink -f -- "$0")")/lib
[[ -r $LIB/launch.sh ]] || LIB=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/scripts/lib # a scheduler's copy
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh"

main() {
  parse_arguments "config nnodes node_rank master port" "$@"
  default_config
  [[ " ${FLAGS[*]} " == *" --dry-run "* ]] || keep_copy
  launch local --health-check
}

# From here on all that is shown is written to this node's log too. The copying process must be
# no child of ours, for the agent that we become ends every process below it, and must outlive
# the signals that stop the run.
keep_copy() {
  local folder=${LOG_DIR:-logs}/distributed_training name pipes node_rank=${PLAN[node_rank]:-${SLURM_NODEID:-0}}
  printf -v name 'cluster_train_%(%Y%m%d-%H%M%S)T_node%s.log' -1 "$node_rank"
  mkdir -p -- "$folder" 2>/dev/null || refuse dir-unwritable "cannot make ${folder@Q}; set LOG_DIR"
  ln -sfn -- "$name" "$folder/latest_node$node_rank.log"
  if [[ " ${FLAGS[*]} " == *" --detach "* ]]; then # what it would copy is in a log anyway
    PLAN[copy]=$folder/$name
    return
  fi
  pipes=$(mktemp -d)
  mkfifo "$pipes/copy"
  (
    trap '' INT TERM HUP
    tee -a -- "$folder/$name" <"$pipes/copy" &
  )
  exec >"$pipes/copy" 2>&1
  rm -r -- "$pipes"
}
main "$@"
