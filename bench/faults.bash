# shellcheck shell=bash
# The functions for the rows of fault_rows.py. Each row runs in its own folder, FOLDER, which all
# hosts of the cluster see.
set -euo pipefail

SMALL=(train.max_steps="$STEPS" train.eval_every=0 train.global_batch_size=20 train.log_every=5)
SMALL+=(model.layers=1 model.width=16)
NODES=(node1 node2 node3 node4)

on() { # <host> <command...>
  "$CLUSTER" run "$@"
}

# Runs a command on each host, with a folder OWN that only that host has.
every() { # <command...>
  local host
  for host in login "${NODES[@]}"; do on "$host" "$@"; done
}

# --- launches -----------------------------------------------------------------------------------

plain() {
  TRAIN_SCRIPT=$SCRIPT over_ssh - 1 "${NODES[@]}" -- "$FOLDER" "$STEPS"
}

over_ssh() { # <argument...>
  on login "$ROOT/scripts/ssh/launch_torchrun_auto.sh" "$@"
}

train() { # <setting...>
  over_ssh "$ROOT/config/local3.yaml" 1 "${NODES[@]}" "${SMALL[@]}" checkpoint.every=0 "$@"
}

# Trains with a task whose rank 2 fails as the file "fault" says.
task() { # <setting...>
  ln -s "$ROOT/bench/fault_task.py" .
  echo "{task: 'fault_task:Faulty', model: {}, tracking: []}" >task.yaml
  over_ssh task.yaml 1 "${NODES[@]}" "${SMALL[@]::4}" "$@"
}

wait_for_slurm() {
  until [[ $(on login sinfo -h -p batch -t idle -o %D) == 4 ]]; do sleep 0.2; done
}

# Runs a command instead of a batch script, in a job on all nodes.
job() { # <command...>
  on login salloc -Q --nodes=4 --ntasks-per-node=1 "$@"
}

slurm() { # <setting...>
  job "$ROOT/scripts/slurm/slurm_train.sh" "$ROOT/config/local3.yaml" "${SMALL[@]}" "$@"
}

# Runs a job on node3 only, until its old processes have seen that it was started elsewhere.
lose_job() {
  local others="node[1,2,4]" job
  on login scontrol update nodename="$others" state=drain reason=bench
  job=$(on login sbatch --parsable --output="$FOLDER/output" --gpus-per-node=1 --nodes=1 "$ROOT/scripts/slurm/slurm_train.sh" \
    "$ROOT/config/local3.yaml" "${SMALL[@]}" checkpoint.every=50)
  until [[ $(on login squeue -h -j "$job" -o %N) == node3 ]]; do sleep 0.2; done
  on login scontrol update nodename="$others" state=resume
  until grep -q '^resumed ' "$FOLDER/output"; do sleep 0.2; done
  on node3 bash -c "kill -CONT -1"
  until grep -q 'node-lost' "$FOLDER/output"; do sleep 0.2; done
  on login scancel "$job"
  until [[ -z $(on login squeue -h -j "$job") ]]; do sleep 0.2; done
}

# Prints the node count and the node rank typed for a node, or nothing if the node was forgotten.
typed_for() { # <node>
  if (($1 == 3)); then echo "$THIRD"; else echo "4 $(($1 - 1))"; fi
}

# Starts a command for each node, and waits for all of them; returns the last code that is not 0.
by_hand() { # <function of node, number of nodes, node rank>
  local node size rank pids=() pid code=0
  for node in 1 2 3 4; do
    read -r size rank <<<"$(typed_for "$node")"
    [[ $size ]] || continue
    if ((node == 4 && ${KNOCKS:-0})); then knock; fi
    "$1" "$node" "$size" "$rank" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
  return "$code"
}

# Sends an HTTP request from node4 to node1's port, once the port is open.
knock() {
  # shellcheck disable=SC2016 # for the node
  on node4 bash -c 'until { printf "GET / HTTP/1.0\r\n\r\n" >"/dev/tcp/node1/$0"; } 2>/dev/null; do
      sleep 0.1
    done' "$MASTER_PORT"
}

hand() {
  by_hand launch_hand
}

launch_hand() { # <node> <number of nodes> <node rank>
  on "node$1" "$ROOT/scripts/ssh/launch_torchrun_multinode.sh" "$ROOT/config/local3.yaml" 1 "$2" "$3" \
    node1 "$MASTER_PORT" "${SMALL[@]}" distributed.join_timeout="${JOIN_S:-30}"
}

torchrun() {
  by_hand launch_torchrun
}

launch_torchrun() { # <node> <number of nodes> <node rank>
  local words=(env OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-}" "$PYTHON")
  [[ ${GLOO_SOCKET_IFNAME:-} ]] || words=(env OMP_NUM_THREADS=1 "$PYTHON")
  words+=(-m torch.distributed.run --nnodes="$2" --nproc-per-node=1 --node-rank="$3")
  words+=(--master-addr="${MASTER_ADDR:-node1}" --master-port="$MASTER_PORT" "${LOGS:-}")
  on login ssh "node$1" "cd $FOLDER && echo \$\$ >torchrun_$1 && exec ${words[*]} $SCRIPT $FOLDER $STEPS"
}

# Ends the processes that torchrun left on the nodes.
end_torchrun() {
  local node
  for node in 1 2 3 4; do
    # shellcheck disable=SC2016 # for the node
    on "node$node" bash -c 'kill -KILL $(pgrep -P "$(<"torchrun_$0")") $(<"torchrun_$0") $(<"rank_$(($0 - 1))")' \
      "$node" 2>/dev/null || true
  done
}

# --- faults -------------------------------------------------------------------------------------

restore() { # <host>
  "$CLUSTER" restore "$1"
  until on login ssh -o ConnectTimeout=5 "$1" true 2>/dev/null; do sleep 0.2; done
}

signal_rank() { # <signal>: to rank 2
  on node3 kill "-$1" "$(<rank_2)"
}

kill_agent() {
  # shellcheck disable=SC2016 # for the node
  on node3 bash -c 'kill -KILL $(ps -o ppid= -p "$0")' "$(<rank_2)"
}

# Kills the sshd of the connection that started node3's ranks.
kill_connection() {
  # shellcheck disable=SC2016 # for the node
  on node3 bash -c 'pid=$0
    until [[ $(ps -o comm= -p "$pid") == sshd ]]; do pid=$(($(ps -o ppid= -p "$pid"))); done
    kill -KILL "$pid"' "$(<rank_2)"
}

# Writes lines into the start-up file of node3's shells.
log_in_with() { # <text>
  mkdir home
  echo "$1" >home/.bashrc
  on node3 mount --bind home "$CLUSTER_DIR/home"
}

log_in_as_before() {
  on node3 umount --lazy "$CLUSTER_DIR/home"
}

# Creates a control group with a memory limit on node3, for everything started by its logins.
limit_memory() { # <bytes>
  local group=/sys/fs/cgroup/memory/${FOLDER##*/}
  mkdir "$group"
  echo "$1" >"$group/memory.limit_in_bytes"
  log_in_with "echo \$\$ >$group/cgroup.procs"
}

lift_limit() {
  log_in_as_before
  until rmdir "/sys/fs/cgroup/memory/${FOLDER##*/}"; do sleep 0.5; done
}

rename_link() { # <name> <new name>: of node3
  on node3 ip link set "$1" down
  on node3 ip link set "$1" name "$2"
  on node3 ip link set "$2" up
}

# Starts a run with the same id on node1 and node2, with its logs elsewhere.
start_another() {
  (
    export LOG_DIR=other STEPS=1000000000
    NODES=(node1 node2)
    plain
  ) &>live &
  echo $! >live.pid
  until grep -q 'step 5' live; do sleep 0.1; done
}

end_other() {
  kill "$(pgrep -P "$(<live.pid)")"
  while kill -0 "$(<live.pid)" 2>/dev/null; do sleep 0.1; done
}

# Gives node3 a different line for the name "head", or none.
name_head() { # <text>
  { grep -v ' head$' "$CLUSTER_DIR/etc/hosts" && echo "$1"; } >hosts
  on node3 mount --bind hosts /etc/hosts
}

# Adds a disk to a host, with room for checkpoints.
add_disk() { # <host> <folder>
  mkdir -p "$2"
  on "$1" mount -t tmpfs -o size=2100m disk "$PWD/$2"
}

# Fills the disk: shrinks it to what is in use now, which may change.
fill_disk() { # <host> <folder>
  # shellcheck disable=SC2016 # for the host
  on "$1" bash -c 'for _ in {1..50}; do
      ! mount -o "remount,size=$(($(df --output=used -k "$0" | tail -n 1)))k" "$0" 2>/dev/null || exit 0
    done
    exit 1' "$PWD/$2"
}
