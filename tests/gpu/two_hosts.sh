#!/usr/bin/env bash
# Run a command on two hosts that are network namespaces of this machine, joined by one link.
#
# usage: tests/gpu/two_hosts.sh true             only find out whether they can be made
#        tests/gpu/two_hosts.sh launch SCRIPT... run it on 2 x 2 ranks, started by hand on each host
#
# Needs no root, if user namespaces are allowed. Prints how many bytes the link has carried.
set -euo pipefail
HERE=$(cd -- "$(dirname -- "$0")/../.." && pwd)
LINK=kit0
FIRST=10.213.7.1 SECOND=10.213.7.2
LIMIT=45 # seconds for a launcher

main() {
  if [[ ${INSIDE:-} != yes ]]; then
    INSIDE=yes exec unshare --user --map-root-user --net --uts -- "$0" "$@"
  fi
  make_hosts
  trap 'kill "$OTHER"' EXIT
  if [[ $1 == launch ]]; then launch "${@:2}"; fi
}

# The second host lives as long as the process OTHER.
make_hosts() {
  local tries
  unshare --net --uts -- sleep 600 &
  OTHER=$!
  for ((tries = 0; tries < 500; tries++)); do
    [[ $(readlink "/proc/$OTHER/ns/net") == "$(readlink /proc/self/ns/net)" ]] || break
    sleep 0.01
  done
  ip link add "$LINK" type veth peer name "$LINK" netns "$OTHER"
  hostname kit-first
  on_other hostname kit-second
  set_up "$FIRST"
  on_other bash -c "$(declare -f set_up); LINK=$LINK; set_up $SECOND"
}

on_other() { # <command...>
  nsenter --net="/proc/$OTHER/ns/net" --uts="/proc/$OTHER/ns/uts" -- "$@"
}

set_up() { # <address>
  ip link set lo up
  ip address add "$1/30" dev "$LINK"
  ip link set "$LINK" up
}

launch() { # <script> <argument...>
  local words code=0 other=0
  words=(timeout --kill-after=10 "$LIMIT" "$HERE/scripts/launch.sh" --nnodes 2 --master-addr "$FIRST" --nproc-per-node 2)
  on_other "${words[@]}" --node-rank 1 "$@" &
  local second=$!
  "${words[@]}" --node-rank 0 "$@" || code=$?
  wait "$second" || other=$?
  awk -v link="$LINK:" '$1 == link { print "carried", $10 }' /proc/net/dev
  exit $((code ? code : other))
}

main "$@"
