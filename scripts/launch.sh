#!/usr/bin/env bash
# Run your own script with torchrun's arguments: type this command instead of torchrun.
#
# usage: scripts/launch.sh [TORCHRUN OPTIONS] [--hosts LIST|FILE|job] SCRIPT [ARGS...]
#
#   --nproc-per-node N    processes on each machine: a number, gpu, cpu or auto (default: 1; with
#                         --hosts: one per GPU)
#   --hosts LIST          start it on these machines over ssh, from here: node1,node2:4,gpu[01-08]
#   --hosts FILE          the same; FILE has a machine per line
#   --hosts job           on all nodes of the SLURM or PBS job: in its batch script or shell, or as
#                         what sbatch and qsub run
#   --via pdsh            with pdsh instead of ssh
#   -m, --module          SCRIPT is a module: -m pkg.mod
#   --no-python           SCRIPT is any program
#   --nnodes N --node-rank R --master-addr ADDR --master-port PORT
#                         several machines: run it on each of them, or once under srun
#   --nnodes N --rdzv-backend c10d --rdzv-endpoint ADDR:PORT
#                         the same on each of them: node rank 0 is the machine that has ADDR
#   SCRIPT                a Python file, or a folder or zip that holds __main__.py
#   ARGS                  everything after SCRIPT is passed to it unchanged, without a `--`
#   torchrun's other options work, too; options of this command go before SCRIPT.
#
# example: scripts/launch.sh --nproc-per-node 4 train.py config/x.py --batch_size=32
#          scripts/launch.sh --hosts node1,node2 --nproc-per-node 8 train.py config/x.py
#          sbatch --nodes=4 --gpus-per-node=8 scripts/launch.sh --hosts job train.py config/x.py
#          pip installs it as: launch --nproc-per-node 4 train.py config/x.py --batch_size=32
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # not sh
set -euo pipefail
HERE=$(dirname -- "$(readlink -f -- "$0")") # or it is a scheduler's copy
for LIB in "$HERE/lib" "${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}"/{,launch-kit/}scripts/lib; do [[ ! -r $LIB/launch.sh ]] || break; done
# shellcheck source=scripts/lib/launch.sh
source "$LIB/launch.sh"

main() {
  DROP_IN=1
  OPTIONS=(
    ["--nproc-per-node"]=nproc ["--nnodes"]=nnodes ["--node-rank"]=node_rank
    ["--master-addr"]=master ["--master-port"]=port ["--standalone"]='!standalone'
    ["--rdzv-backend"]=rdzv_backend ["--rdzv-endpoint"]=rdzv_endpoint ["--rdzv-id"]=run-id
    ["--max-restarts"]=max-restarts ["--log-dir"]=log-dir ["--hosts"]=hosts ["--via"]=via
    ["-m"]='!as-module' ["--module"]='!as-module' ["--no-python"]='!as-command'
  )
  local option
  for option in --rdzv-conf --monitor-interval --start-method --event-log-handler --role -r --redirects \
    -t --tee --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --local-addr \
    --logs-specs --numa-binding --signals-to-handle --shutdown-timeout; do OPTIONS[$option]=@; done
  for option in --run-path --virtual-local-rank; do OPTIONS[$option]='!@'; done
  parse_arguments "program..." "$@"
  ((${#REST[@]})) || die 2 "no SCRIPT; usage: $(usage_line)"
  take_variables
  count_processes
  local fanout=local
  if [[ -n ${PLAN[hosts]:-} ]]; then fanout=auto; else find_master; fi
  [[ $0 != */slurm_script && $0 != *.SC ]] || name_batch_script scripts/launch.sh "$0"
  launch "$fanout" --like-torchrun
}

# As torchrun does, take what was not typed from PET_NNODES and the like.
take_variables() {
  local option name LC_ALL=C # Turkish has another upper case of i
  for option in "${!OPTIONS[@]}"; do
    name=${option#--} && name=PET_${name//-/_} && name=${name^^}
    [[ $option != --* || ${OPTIONS[$option]} == [@!]* ]] && continue
    [[ -z ${!name:-} ]] || : "${PLAN[${OPTIONS[$option]}]=${!name}}"
  done
}

count_processes() {
  [[ -n ${PLAN[hosts]:-} ]] || : "${PLAN[nproc]=${NPROC_PER_NODE:-1}}"
  case ${PLAN[nproc]:-} in
    cpu) PLAN[nproc]=$(getconf _NPROCESSORS_ONLN) ;;
    auto) PLAN[cpu_nproc]=$(getconf _NPROCESSORS_ONLN) ;;
    gpu) PLAN[nproc]=auto PLAN[cpu_nproc]=0 ;;
  esac
}

# What torchrun's rendezvous says of the nodes, as their number, this one's rank and the master.
find_master() {
  local nodes=${PLAN[nnodes]:-} backend=${PLAN[rdzv_backend]:-static} endpoint=${PLAN[rdzv_endpoint]:-}
  unset 'PLAN[rdzv_backend]' 'PLAN[rdzv_endpoint]'
  [[ $nodes != *:* || ${nodes%:*} != "${nodes#*:}" ]] || nodes=${nodes%:*}
  [[ $nodes != *:* ]] || die 2 "--nnodes $nodes: the number of nodes cannot change during a run; give one number"
  [[ $backend == static || $backend == c10d ]] ||
    die 2 "--rdzv-backend $backend: unknown here; leave it out, and give --master-addr"
  [[ " ${FLAGS[*]} " != *" --standalone "* ]] || nodes=1
  [[ $endpoint != localhost:0 ]] || : "${nodes:=1}" # torchrun's default
  [[ -z $nodes ]] || PLAN[nnodes]=$nodes
  [[ ${nodes:-1} != 1 || -n ${SLURM_STEP_ID:-} ]] || return 0
  [[ $backend == static || -n ${PLAN[node_rank]:-}${SLURM_STEP_ID:-} ]] || PLAN[node_rank]=auto
  [[ -n $endpoint && $nodes != 1 ]] || return 0
  [[ $endpoint != *:* ]] || : "${PLAN[port]=${endpoint##*:}}"
  endpoint=${endpoint%:*} && endpoint=${endpoint#[}
  : "${PLAN[master]=${endpoint%]}}"
}
main "$@"
