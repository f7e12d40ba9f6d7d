#!/usr/bin/env bash
# Train on several machines through torch.distributed.launch, for older PyTorch: run this once.
#
# usage: scripts/ssh/launch_multinode.sh CONFIG NPROC NODE... [key=value...] [-- ARGS...]
#
#   CONFIG     the configuration, a YAML file, at the same path on every node
#   NPROC      processes on each node
#   NODE       what ssh calls a node: a name, user@host, an alias, an address; node:4 for another
#              number of processes there, gpu[01-08] for a list. The first is node rank 0
#   -f FILE    more nodes, one a line
#   --use-env  tell the ranks their local rank by LOCAL_RANK alone, not by --local-rank too
#   key=value  settings that replace the config's
#
# example: scripts/ssh/launch_multinode.sh config/local3.yaml 8 node1 node2
set -euo pipefail
LIB=$(dirname -- "$(readlink -f -- "$0")")/../lib
[[ -r $LIB/launch.sh ]] || LIB=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/scripts/lib # a scheduler's copy
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh" ssh

main() {
  OPTIONS=(["-f"]=hostfile ["--use-env"]='!use_env')
  parse_arguments "config nproc nodes..." "$@"
  choose_python
  plan[engine]=torch.distributed.launch
  plan_nodes
  launch
}
main "$@"
