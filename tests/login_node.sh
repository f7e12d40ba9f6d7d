#!/usr/bin/env bash
# Runs a command as on a login node, and with a job's variables: a scheduler answers, root's home has
# ssh settings and a .bashrc that prints, and the locale and umask are unusual. Needs root.
#
# usage: tests/login_node.sh COMMAND...
#
# example: tests/login_node.sh tests/run.sh fast
set -euo pipefail
WORK=$(mktemp -d)
trap 'rm -rf -- "$WORK"' EXIT

main() {
  ((EUID == 0)) || { echo "login_node.sh: it gives root another home, which only root can do; run it as root" >&2 && exit 3; }
  make_scheduler
  make_home
  awk -F: -v OFS=: -v home="$WORK/home" '$3 == 0 { $6 = home } 1' /etc/passwd >"$WORK/passwd"
  chmod 755 "$WORK"
  chmod 644 "$WORK/passwd"
  export PATH=$WORK/bin:$PATH HOME=$WORK/home
  set_variables
  umask 077
  # shellcheck disable=SC2016 # expanded by the shell in the namespace
  unshare --mount bash -c 'mount --bind "$0" /etc/passwd && exec "$@"' "$WORK/passwd" "$@"
}

# Each command ignores its arguments, and prints a job, as scontrol prints all jobs of the machine.
make_scheduler() {
  local tool
  mkdir "$WORK/bin"
  printf '#!/bin/sh\necho "JobId=7 JobName=theirs"\necho "   Command=%s/scripts/slurm/slurm_train.sh"\n' "$PWD" >"$WORK/bin/sinfo"
  chmod +x "$WORK/bin/sinfo"
  for tool in squeue scontrol sbatch srun salloc scancel sacct qstat qsub; do ln -s sinfo "$WORK/bin/$tool"; done
}

make_home() {
  mkdir -p "$WORK/home/.ssh"
  printf 'Host node* n1 n2 localhost\n  User nobody\n  Port 2\n  ProxyCommand false\n' >"$WORK/home/.ssh/config"
  ssh-keygen -q -t ed25519 -N '' -f "$WORK/home/.ssh/id_ed25519"
  echo "node1,node2,10.0.0.1 $(<"$WORK/home/.ssh/id_ed25519.pub")" >"$WORK/home/.ssh/known_hosts"
  echo 'echo "Welcome to the cluster"; alias ls=false' | tee "$WORK/home/.bashrc" >"$WORK/home/.profile"
}

# Variables that launchers, Python and the shell read.
set_variables() {
  local rank=(RANK=3 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=2 MASTER_ADDR=theirs MASTER_PORT=1)
  export "${rank[@]}" SLURM_JOB_ID=7 SLURM_JOBID=7 SLURM_JOB_NUM_NODES=4 SLURM_NNODES=4 SLURM_NTASKS=8 SLURM_PROCID=3 \
    SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_ID=0 SLURM_JOB_NODELIST='n[1-4]' SLURM_CONF=/nowhere PBS_JOBID=8 \
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 RUN_ID=theirs LOG_DIR=/proc/none BACKEND=nccl LAUNCHER=srun \
    NPROC_PER_NODE=8 MAX_RESTARTS=2 GRACE=1 SSH_OPTS='-F /nowhere' FORWARD_ENV=NONE SKIP_PREFLIGHT=1 TRAIN_SCRIPT=/nowhere \
    NCCL_SOCKET_IFNAME=ib9 GLOO_SOCKET_IFNAME=ib9 OMP_NUM_THREADS=64 CUDA_VISIBLE_DEVICES=5 LANG=tr_TR.ISO-8859-9 LC_ALL=POSIX \
    PYTHONPATH=/nowhere CONDA_ENV=theirs MODULES=theirs NO_COLOR=1
  # shellcheck disable=SC2317 # the shells that inherit it may call it
  module() { echo "their modules"; }
  export -f module
}
main "$@"
