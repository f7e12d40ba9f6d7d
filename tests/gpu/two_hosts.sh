#!/usr/bin/env bash
# Run a command on two hosts that are network namespaces of this machine, joined by one link.
#
# usage: tests/gpu/two_hosts.sh true             only find out whether they can be made
#        tests/gpu/two_hosts.sh launch SCRIPT... run it on 2 x 2 ranks, started by hand on each host
#        tests/gpu/two_hosts.sh cut SECONDS FOLDER SCRIPT...
#                                                the same; cut the link for so long (0: for good)
#                                                once each rank has written FOLDER/RANK
#        tests/gpu/two_hosts.sh hosts SCRIPT...  the same with --hosts, over ssh
#
# UNDER=torchrun starts it with torchrun instead of launch.sh. Needs no root, if user namespaces are
# allowed, except for hosts. Prints how many bytes the link has carried.
set -euo pipefail
HERE=$(cd -- "$(dirname -- "$0")/../.." && pwd)
LINK=kit0
FIRST=10.213.7.1 SECOND=10.213.7.2
LIMIT=${LIMIT:-45} # seconds for a launcher
OTHERS=()          # processes that end with this one

main() {
  if [[ ${INSIDE:-} != yes ]]; then
    local root=(--user --map-root-user)
    [[ $1 != hosts ]] || root=() # sshd cannot change users in a user namespace
    INSIDE=yes exec unshare "${root[@]}" --net --uts -- "$0" "$@"
  fi
  make_hosts
  trap 'kill "${OTHERS[@]}"' EXIT
  case $1 in
    launch) launch "${@:2}" ;;
    hosts) launch_over_ssh "${@:2}" ;;
    cut)
      cut_link "$2" "$3" &
      OTHERS+=($!)
      launch "${@:4}"
      ;;
  esac
}

# The second host lives as long as the process OTHER.
make_hosts() {
  local tries
  unshare --net --uts -- sleep 600 &
  OTHER=$!
  OTHERS+=("$OTHER")
  for ((tries = 0; tries < 500; tries++)); do
    [[ $(readlink "/proc/$OTHER/ns/net") == "$(readlink /proc/self/ns/net)" ]] || break
    sleep 0.01
  done
  ENTER=(nsenter --net="/proc/$OTHER/ns/net" --uts="/proc/$OTHER/ns/uts" --)
  ip link add "$LINK" type veth peer name "$LINK" netns "$OTHER"
  hostname kit-first
  on_other hostname kit-second
  set_up "$FIRST"
  on_other bash -c "$(declare -f set_up); LINK=$LINK; set_up $SECOND"
}

on_other() { # <command...>
  "${ENTER[@]}" "$@"
}

set_up() { # <address>
  ip link set lo up
  ip address add "$1/30" dev "$LINK"
  ip link set "$LINK" up
}

launch() { # <script> <argument...>
  local words code=0 other=0
  words=("$HERE/scripts/launch.sh" --master-addr "$FIRST")
  if [[ ${UNDER:-} == torchrun ]]; then # it cannot resolve the hosts' names
    words=("$PYTHON" -m torch.distributed.run --master-addr "$FIRST" --master-port 29517)
    export GLOO_SOCKET_IFNAME=$LINK NCCL_SOCKET_IFNAME=$LINK
  fi
  words=(timeout --kill-after=10 "$LIMIT" "${words[@]}" --nnodes 2 --nproc-per-node 2)
  on_other "${words[@]}" --node-rank 1 "$@" &
  local second=$!
  "${words[@]}" --node-rank 0 "$@" || code=$?
  wait "$second" || other=$?
  finish "$code" "$other"
}

finish() { # <exit code on the first host> <on the second>
  echo "codes $1 $2"
  awk -v link="$LINK:" '$1 == link { print "carried", $10 }' /proc/net/dev
  exit $(($1 ? $1 : $2))
}

# The second host's interface is down; the first one's has no carrier, as with a cable that is cut.
# Its wait for the ranks ends with the launchers.
cut_link() { # <seconds> <folder>
  until [[ -e $2/0 && -e $2/1 && -e $2/2 && -e $2/3 ]]; do sleep 0.05; done
  on_other ip link set "$LINK" down
  touch "$2/cut"
  (($1)) || return 0
  sleep "$1"
  on_other ip link set "$LINK" up
}

launch_over_ssh() { # <script> <argument...>
  local folder code=0
  folder=$(mktemp -d)
  # shellcheck disable=SC2064 # the folder's name now
  trap "kill \"\${OTHERS[@]}\"; rm -r '$folder'" EXIT
  ssh-keygen -q -t ed25519 -N '' -f "$folder/key"
  cp "$folder/key.pub" "$folder/authorized_keys"
  mkdir -p /run/sshd "$folder/bin"
  start_sshd "$folder" "$FIRST" env
  start_sshd "$folder" "$SECOND" "${ENTER[@]}"
  printf '#!/bin/sh\nexec %q -i %q -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no -o LogLevel=ERROR "$@"\n' \
    "$(type -P ssh)" "$folder/key" >"$folder/bin/ssh"
  chmod +x "$folder/bin/ssh"
  PATH=$folder/bin:$PATH timeout --kill-after=10 "$LIMIT" \
    "$HERE/scripts/launch.sh" --hosts "$FIRST,$SECOND" --nproc-per-node 2 "$@" || code=$?
  finish "$code" 0
}

start_sshd() { # <folder> <address> <command that enters the host...>
  "${@:3}" "$(type -P sshd)" -D -e -f /dev/null -h "$1/key" -o "ListenAddress=$2" -o PidFile=none \
    -o "AuthorizedKeysFile=$1/authorized_keys" -o StrictModes=no -o PermitRootLogin=yes &
  OTHERS+=($!)
}

main "$@"
