#!/usr/bin/env bash
# A cluster in a box: hosts "login" and "node1" to "nodeN" on this machine, under a real SLURM.
#
# usage: tests/cluster/cluster.sh COMMAND
#
#   deps                 install SLURM, munge, OpenSSH, pdsh, Charliecloud and podman with apt-get
#                        (only what is missing)
#   check                print what prevents a cluster from running here, if anything does
#   up [N]               start it with N nodes (default: 4); one that is already up ends first
#   down                 end it and everything that runs on it
#   shell [HOST]         open a shell on a host (default: login, for sbatch and ssh)
#   run HOST COMMAND...  run a command on a host, in the caller's folder; forwards signals to it
#   env                  print variables for this machine's shell to reach it: source <(...)
#   cut HOST             unplug a node's network cable, or the login's from all nodes
#   slow HOST RATE       throttle a node's link to a rate such as 10mbit, both ways
#   drop HOST PORT       start a firewall on a node that drops input to a TCP port
#   restore HOST         undo cut, slow and drop
#
# CLUSTER_CPUS=N: each node has N of this machine's CPUs, and SLURM binds tasks to them. By default,
# each node has 64 CPUs, which SLURM only counts.
#
# example: tests/cluster/cluster.sh up 2 && tests/cluster/cluster.sh run login srun -N2 hostname
#
# CLUSTER_DIR (default: /var/lib/launch-kit-cluster) holds all its files; clusters with different
# folders are separate. A host has its own name, network, process ids, /run, /dev/shm, sshd and
# slurmd. Everything else is shared, as on a cluster with NFS, including an empty home. Hosts cannot
# reach other networks.
set -euo pipefail
shopt -s nullglob
# These names must not be exported: commands on hosts get the caller's variables.
BOX_HERE=$(dirname -- "$(readlink -f -- "$0")")
BOX=${CLUSTER_DIR:-/var/lib/launch-kit-cluster}
BOX_MARK=$BOX/.cluster-in-a-box # a folder that holds it may be removed
# Adds the packages' own folders, because the caller's PATH may omit the scheduler.
PATH=${PATH//"$BOX/bin:"/}:/usr/bin:/usr/sbin:/sbin
BOX_TOOLS=( # <package>:<its command>
  slurmctld:slurmctld slurmd:slurmd slurm-client:sbatch munge:munged
  openssh-server:sshd pdsh:pdsh iproute2:tc iptables:iptables
)
BOX_ALSO=(charliecloud:ch-run podman:podman runc:runc) # for the tests with containers
BOX_WAIT_S=120                                         # the limit of every wait

main() {
  [[ $BOX =~ ^/[A-Za-z0-9/._-]+$ && $BOX/ != /run/* ]] ||
    die 2 "CLUSTER_DIR=$BOX cannot be used; give an absolute path outside /run, with only letters, digits and . _ -"
  case ${1:-} in
    deps | check | up | down) "$@" ;;
    env) print_variables ;;
    shell) open_shell "${2:-login}" ;;
    run) run_on "${@:2}" ;;
    cut | slow | drop | restore) "$1_link" "${@:2}" ;;
    become) become_host "$2" ;; # for start_host
    "" | -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" ;;
    *) die 2 "unknown command '$1'; --help lists the commands" ;;
  esac
}

die() { # <exit code> <text>
  echo "cluster.sh: $2" >&2
  exit "$1"
}

# --- packages -----------------------------------------------------------------------------------

packages_missing() { # <package:its command...>
  local tool
  for tool; do
    type -P "${tool#*:}" >/dev/null || echo "${tool%:*}"
  done
}

check() {
  local missing
  mapfile -t missing < <(packages_missing "${BOX_TOOLS[@]}")
  ((${#missing[@]} == 0)) || die 3 "not installed: ${missing[*]}; run make cluster-deps as root"
  ((EUID == 0)) || die 3 "only root can create the hosts; run this as root"
  unshare --net --uts --mount --pid --fork ip link add probe type bridge 2>/dev/null ||
    die 3 "this machine allows no network namespaces or bridges; use a virtual machine or a privileged container"
}

deps() {
  local missing
  mapfile -t missing < <(packages_missing "${BOX_TOOLS[@]}")
  install_packages "${missing[@]}"
  mapfile -t missing < <(packages_missing "${BOX_ALSO[@]}")
  install_packages "${missing[@]}" || echo "without ${missing[*]}, the tests with containers are skipped"
}

install_packages() ( # <package...>
  local policy=/usr/sbin/policy-rc.d
  (($# > 0)) || return 0
  ((EUID == 0)) || die 3 "only root can install packages; run make cluster-deps as root"
  echo "installing $* with apt-get; none of their services is started or enabled"
  # If this file exits with 101, a package's script starts no service.
  if [[ ! -e $policy ]]; then
    trap 'rm -f -- /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  apt-get -qq update
  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
    --no-upgrade --no-install-recommends "$@" >/dev/null || return
  [[ ! -d /run/systemd/system ]] || disable_services "$@"
)

# Keeps services from starting at the next boot. Call it only for newly installed packages.
disable_services() { # <package...>
  local package
  for package in "$@"; do
    case $package in
      slurmctld | slurmd | munge) systemctl disable --now "$package" ;;
      openssh-server) systemctl disable --now ssh.service ssh.socket ;;
    esac
  done
}

# --- up and down --------------------------------------------------------------------------------

up() { # [<nodes>]
  local nodes=${1:-4} host
  [[ $nodes =~ ^[1-9][0-9]?$ ]] || die 2 "cannot create '$nodes' nodes; give a number from 1 to 99"
  BOX_WAIT_S=$((BOX_WAIT_S + nodes))
  check
  down
  raise_neighbours $((4 * nodes * nodes))
  trap give_up EXIT
  make_files "$nodes"
  exec 3>&- 4>&- # bats waits for every process that holds these
  for host in $(hosts); do start_host "$host"; done
  wait_until "every host has started" hosts_have_started
  connect_hosts
  for host in $(hosts); do start_daemons "$host"; done
  wait_until "$nodes nodes are idle" nodes_are_idle "$nodes"
  trap - EXIT
  echo "up: login and node1 to node$nodes; make cluster-shell opens a shell, make cluster-down stops the cluster"
}

# The hosts share this machine's table of neighbour addresses. In a container, its limits may be
# read-only; a cluster of few hosts does not need higher ones.
raise_neighbours() { # <entries>
  local limit
  for limit in /proc/sys/net/ipv4/neigh/default/gc_thresh{2,3}; do
    [[ -w $limit ]] || continue
    (($(<"$limit") >= $1)) || echo "$1" >"$limit"
  done
}

down() {
  local host
  [[ -e $BOX_MARK ]] || return 0
  for host in $(hosts); do
    if find_init "$host"; then kill -KILL "$BOX_INIT"; fi
  done
  wait_until "every host is gone" hosts_are_gone
  rm -rf -- "$BOX"
}

give_up() {
  local logs=("$BOX"/logs/*)
  ((${#logs[@]} == 0)) || tail -n 3 -- "${logs[@]}" >&2
  down
}

hosts() {
  local host
  for host in "$BOX"/hosts/*; do echo "${host##*/}"; done
}

make_files() { # <nodes>
  local host i file hosts=(login) address=10.0.0.254 tasks=none
  [[ -z ${CLUSTER_CPUS:-} ]] || tasks=affinity
  rmdir -- "$BOX" 2>/dev/null || [[ ! -e $BOX ]] || die 2 "$BOX contains other files; set CLUSTER_DIR to another folder"
  mkdir -p -- "$BOX"/{bin,etc,gpus,home,hosts,keys,logs,state}
  touch "$BOX_MARK"
  for ((i = 0; i < 8; i++)); do ln -s /dev/null "$BOX/gpus/gpu$i"; done # SLURM needs device files
  chmod 700 "$BOX/keys" "$BOX/state"
  (umask 077 && head -c 1024 /dev/urandom >"$BOX/keys/munge")
  ssh-keygen -q -t ed25519 -N '' -C cluster-in-a-box -f "$BOX/keys/user"
  for ((i = 1; i <= $1; i++)); do hosts+=("node$i"); done
  printf '%s localhost\n' 127.0.0.1 ::1 >"$BOX/etc/hosts"
  for ((i = 0; i <= $1; i++)); do
    host=${hosts[i]}
    ((i == 0)) || address=10.0.0.$i
    : >"$BOX/hosts/$host"
    echo "$address $host" >>"$BOX/etc/hosts"
    ssh-keygen -q -t ed25519 -N '' -C "$host" -f "$BOX/keys/$host"
    echo "$host,$address,fd00::${address##*.} $(<"$BOX/keys/$host.pub")" >>"$BOX/etc/known_hosts"
  done
  # ssh and sshd look for root's files in this home, not in the caller's.
  awk -F: -v OFS=: -v home="$BOX/home" '$3 == 0 { $6 = home } 1' /etc/passwd >"$BOX/etc/passwd"
  for file in "$BOX_HERE"/etc/*; do
    sed "s|@DIR@|$BOX|g; s|@NODES@|$1|g; s|@CPUS@|${CLUSTER_CPUS:-64}|g; s|@TASKS@|$tasks|g" "$file" >"$BOX/etc/${file##*/}"
  done
  make_commands
}

# Commands for this machine's shell, each of which runs on login.
make_commands() {
  local name
  # shellcheck disable=SC2016 # $0 and $@ are the command's
  printf '#!/usr/bin/env bash\nCLUSTER_DIR=%q exec %q run login "${0##*/}" "$@"\n' "$BOX" "$BOX_HERE/cluster.sh" \
    >"$BOX/bin/on-login"
  chmod +x "$BOX/bin/on-login"
  for name in sbatch srun salloc squeue sinfo scancel scontrol ssh scp pdsh; do
    ln -s on-login "$BOX/bin/$name"
  done
}

# --- hosts --------------------------------------------------------------------------------------

start_host() { # <host>
  (cd / && exec setsid unshare --net --uts --mount --pid --fork -- "$BOX_HERE/cluster.sh" become "$1") \
    </dev/null &>"$BOX/logs/$1.log" &
}

# The first process of a host. When it dies, the kernel ends all other processes of the host, and
# removes its namespaces and mounts. It also exits if the cluster's folder is removed.
become_host() { # <host>
  local pid
  read -r pid _ </proc/self/stat # its process id on the machine: /proc is still the machine's
  hostname "$1"
  ip link set lo up
  mount --bind "$BOX/etc/hosts" /etc/hosts
  mount --bind "$BOX/etc/passwd" /etc/passwd
  mount --bind "$BOX/etc/ssh_config" /etc/ssh/ssh_config # ssh needs no options, reads no user keys
  mount -t tmpfs -o mode=755 run /run                    # hides the machine's munge, resolver, sshd
  mkdir /run/munge /run/sshd
  mount -t tmpfs shm /dev/shm
  mount -t proc proc /proc
  echo "$pid $(readlink /proc/self/ns/pid)" >"$BOX/hosts/$1"
  while [[ -e $BOX_MARK ]]; do
    sleep 5 &
    wait $! # and reap orphans in the meantime
  done
}

start_daemons() { # <host>
  on "$1" munged --key-file="$BOX/keys/munge" --seed-file=/run/munge/seed --log-file="$BOX/logs/munged-$1.log"
  on "$1" "$(type -P sshd)" -f "$BOX/etc/sshd_config" -h "$BOX/keys/$1" -E "$BOX/logs/sshd-$1.log"
  if [[ $1 == login ]]; then on login slurmctld -i; else on "$1" slurmd -N "$1"; fi
}

# Sets BOX_INIT: the first process of a host. A later process with its id is in another namespace.
find_init() { # <host>
  local namespace
  [[ -s $BOX/hosts/$1 ]] || return # not started yet, or no such host
  read -r BOX_INIT namespace <"$BOX/hosts/$1"
  [[ $(readlink "/proc/$BOX_INIT/ns/pid") == "$namespace" ]]
}

hosts_have_started() {
  local host
  for host in $(hosts); do find_init "$host" || return; done
}

hosts_are_gone() {
  local host
  for host in $(hosts); do ! find_init "$host" || return; done
}

nodes_are_idle() { # <number>
  [[ $(on login sinfo -h -p batch -t idle -o %D 2>/dev/null) == "$1" ]]
}

# A node's link has an interface on login, with the node's name, and one on the node, eth0.
connect_hosts() {
  local address host login
  on login ip link add switch type bridge
  on login ip address add 10.0.0.254/24 dev switch
  on login ip address add fd00::254/64 dev switch nodad 2>/dev/null || true # if there is IPv6
  on login ip link set switch up
  find_init login && login=$BOX_INIT
  while read -r address host; do
    [[ $host == node* ]] || continue
    find_init "$host"
    ip link add "$host" netns "$login" type veth peer name eth0 netns "$BOX_INIT"
    on login ip link set "$host" master switch up
    on "$host" ip address add "$address/24" dev eth0
    on "$host" ip address add "fd00::${address##*.}/64" dev eth0 nodad 2>/dev/null || true
    on "$host" ip link set eth0 up
  done <"$BOX/etc/hosts"
}

# --- commands on hosts --------------------------------------------------------------------------

print_variables() {
  cat <<END
export SLURM_CONF=$BOX/etc/slurm.conf
export SSH_OPTS="-F $BOX/etc/ssh_config"
export PDSH_RCMD_TYPE=ssh
export PDSH_SSH_ARGS_APPEND="-F $BOX/etc/ssh_config"
export PATH=$BOX/bin:\$PATH
END
}

# Sets BOX_ENTER, the start of a command that runs on a host. The command dies with its caller.
find_way() { # <host>
  find_init "$1" || die 3 "no host '$1' is up; start it with make cluster-up"
  BOX_ENTER=( # PATH is the caller's, except for our stand-ins
    nsenter --target "$BOX_INIT" --net --uts --mount --pid
    setpriv --pdeathsig KILL env --unset=HOSTNAME --chdir="$PWD" PATH="$PATH" HOME="$BOX/home"
    SLURM_CONF="$BOX/etc/slurm.conf" PDSH_RCMD_TYPE=ssh
    SSH_OPTS="-F $BOX/etc/ssh_config" PDSH_SSH_ARGS_APPEND="-F $BOX/etc/ssh_config"
  )
}

on() { # <host> <command...>
  find_way "$1"
  "${BOX_ENTER[@]}" "${@:2}"
}

open_shell() { # <host>
  find_way "$1"
  exec "${BOX_ENTER[@]}" bash -i
}

# A process cannot enter another PID namespace, only its children can. So we forward the signals
# that we receive, and if we are killed, the command is killed too.
run_on() { # <host> <command...>
  find_way "$1"
  [[ ! -t 0 ]] || exec "${BOX_ENTER[@]}" "${@:2}" # a terminal signals the command itself
  set -m                                          # without job control the command would ignore SIGINT
  setpriv --pdeathsig KILL "${BOX_ENTER[@]}" "${@:2}" <&0 &
  set +m
  local signal code=0
  for signal in HUP INT TERM USR1 USR2; do
    # shellcheck disable=SC2064 # both are known now
    trap "pass_on $signal $!" "$signal"
  done
  exec 2>/dev/null # bash would report how the command died
  until wait $! && code=0; do
    code=$?
    kill -0 $! || exit "$code"
  done
}

pass_on() { # <signal> <parent of the process to signal>
  kill "-$1" "$(<"/proc/$2/task/$2/children")"
}

# --- faults -------------------------------------------------------------------------------------

cut_link() { # <host>
  if [[ $1 == login ]]; then
    on login iptables --append INPUT ! --in-interface lo --jump DROP
    on login iptables --append OUTPUT ! --out-interface lo --jump DROP
  else
    on login ip link set "$1" down
  fi
}

slow_link() { # <host> <rate>
  local limit=(root tbf rate "$2" burst 32kb latency 400ms)
  on login tc qdisc replace dev "$1" "${limit[@]}"
  on "$1" tc qdisc replace dev eth0 "${limit[@]}"
}

lift_limit() { # <host> <device>
  local shown
  shown=$(on "$1" tc qdisc show dev "$2")
  [[ $shown != *"qdisc tbf "* ]] || on "$1" tc qdisc delete dev "$2" root
}

drop_link() { # <host> <port>
  on "$1" iptables --append INPUT --protocol tcp --dport "$2" --jump DROP
}

restore_link() { # <host>
  if [[ $1 != login ]]; then
    on login ip link set "$1" up
    lift_limit login "$1"
    lift_limit "$1" eth0
  fi
  ! type -P iptables >/dev/null || on "$1" iptables --flush
  on login scontrol reconfigure # contacts lost slurmds now, not minutes later
}

wait_until() { # <what is waited for> <command...>
  local end=$((SECONDS + BOX_WAIT_S))
  until "${@:2}"; do
    ((SECONDS < end)) || die 3 "not within $BOX_WAIT_S s: $1; see $BOX/logs"
    sleep 0.05
  done
}
main "$@"
