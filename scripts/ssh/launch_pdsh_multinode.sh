#!/usr/bin/env bash
# Train on several machines through pdsh. Run it once.
#
# usage: scripts/ssh/launch_pdsh_multinode.sh CONFIG NPROC NODE... [key=value...] [-- ARGS...]
#
# example: scripts/ssh/launch_pdsh_multinode.sh config/local3.yaml 8 node1 node2
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
case $0 in */slurm_script) FILE=$(scontrol show job "${SLURM_JOB_ID:-none}" 2>/dev/null | sed -n 's/\.sh .*/.sh/; s/^ *Command=//p' | tail -n 1) || FILE=$0 ;; *) FILE=$0 ;; esac # SLURM runs a copy
for LIB in "$(dirname -- "$(readlink -f -- "$FILE")")/../lib" "${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}"/{,launch-kit/}scripts/lib; do [[ ! -r $LIB/launch.sh ]] || break; done
[[ -r $LIB/launch.sh ]] || { echo "launch_pdsh_multinode.sh: this copy cannot find scripts/lib; submit it from the project's folder or the one containing launch-kit/ [env-missing]" >&2 && exit 3; }
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh"
run_command launch_pdsh_multinode "$@"
