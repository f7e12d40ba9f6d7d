#!/usr/bin/env bash
# Write the SLURM_* variables of each kind of step, from a real SLURM, into the .env files here, one
# NAME=value per line.
#
# usage: tests/cluster/environments/take.sh
set -euo pipefail
HERE=$(dirname -- "$(readlink -f -- "$0")")
WORK=$(mktemp -d)
export CLUSTER_DIR=$WORK/cluster HERE
cd /tmp # SLURM_SUBMIT_DIR

main() {
  trap '"$HERE/../cluster.sh" down; rm -rf -- "$WORK"' EXIT
  "$HERE/../cluster.sh" up 3
  make_tell
  # A job of 2 x 2 tasks: the batch script, the last task, a step only on the second node, and the
  # second of two tasks on different nodes each write their variables.
  job -N2 --ntasks-per-node=2 --gres=gpu:2 --wrap "tell batch-step; srun tell srun-step 3
    srun -N1 -n1 -w node2 tell sub-step; srun -n2 --ntasks-per-node=1 tell one-per-node-step 1"
  on_login salloc -N2 --ntasks-per-node=2 tell salloc-command
  on_login salloc -N2 --gpus-per-node=2 tell salloc-gpus-command
  on_login script -qc 'salloc -N2 --ntasks-per-node=2' /dev/null <<<$'tell salloc-interactive-step; exit\n'
  on_login script -qc 'srun -N2 -n4 --pty tell srun-pty-step' /dev/null
  job --array=5 -n2 --wrap "tell array-batch-step; srun tell array-step 1"
  # Groups of 1 x 1 and 2 x 2 tasks: the first task of each, and of a plain srun, writes its own.
  job -N1 -n1 : -N2 --ntasks-per-node=2 --wrap "tell het-batch-step; srun tell het-plain-step
    srun --het-group=0,1 bash -c 'tell het-group-0-step 0; tell het-group-1-step 1'"
  # Here, hosts are listed in a different order from the tasks: task 0 is on node3.
  on_login salloc -w node3 -N1 -n1 : -w 'node[1-2]' -N2 --ntasks-per-node=2 srun --het-group=0,1 tell het-reversed-step 0
  printf 'node3\nnode1\nnode1\n' >"$WORK/hosts"
  SLURM_HOSTFILE=$WORK/hosts on_login srun -n3 --distribution=arbitrary tell arbitrary-step 0
  # shellcheck disable=SC2016 # expanded in the job
  job --wrap 'if [ "$SLURM_RESTART_COUNT" ]; then tell requeued-batch-step; else scontrol requeue $SLURM_JOB_ID; sleep 60; fi'
}

on_login() {
  PATH=$WORK:$PATH "$HERE/../cluster.sh" run login "$@"
}

job() {
  on_login sbatch --wait --output=/dev/null "$@"
}

# tell NAME [TASK]: writes this process's variables if it is task TASK (default: 0).
make_tell() {
  cat >"$WORK/tell" <<'END'
#!/usr/bin/env bash
[[ ${SLURM_PROCID:-0} == "${2:-0}" ]] || exit 0
env | grep '^SLURM_' | grep -vE '^SLURM_(CONF|HOSTFILE)=' | LC_ALL=C sort >"$HERE/$1.env"
END
  chmod +x "$WORK/tell"
}
main
