#!/usr/bin/env bash
# Train on several machines through torch.distributed.launch, for older PyTorch. Run it once.
#
# usage: scripts/ssh/launch_multinode.sh CONFIG NPROC NODE... [key=value...] [-- ARGS...]
#
#   --use-env  pass the local rank only as LOCAL_RANK, not also as --local-rank
#
# example: scripts/ssh/launch_multinode.sh config/local3.yaml 8 node1 node2
set -euo pipefail
LIB=$(dirname -- "$(readlink -f -- "$0")")/../lib
[[ -r $LIB/launch.sh ]] || LIB=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/scripts/lib # a scheduler's copy
[[ -r $LIB/launch.sh ]] || LIB=${LIB%/*/*}/launch-kit/scripts/lib                  # make init
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh"

main() {
  OPTIONS=(["-f"]=hostfile ["--use-env"]='!use-env')
  PLAN[engine]=torch.distributed.launch
  parse_arguments "config nproc nodes..." "$@"
  launch ssh
}
main "$@"
