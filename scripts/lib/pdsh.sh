# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# Fan-out through pdsh, which starts the agents. It forwards no stdin, and what it is given shows in
# the list of processes: so the connections of ssh.sh put the command there, and hold the leashes.

# shellcheck source=scripts/lib/ssh.sh
source "$LIB/ssh.sh"

require_tools() {
  [[ -n $DRY_RUN ]] || type -P pdsh >/dev/null ||
    refuse env-missing "there is no pdsh here; install it, or use launch_torchrun_auto.sh"
}

paste_line() { # <node> <command>
  quote_line pdsh -R ssh -S -w "$1" "${2//%/%%}"
}

fanout_start() {
  start_nodes start_by_pdsh
  await ready $((SECONDS + 8 + SLACK))
  apart run_pdsh
  watch_nodes
}

run_pdsh() {
  local IFS=, node
  trap - EXIT
  trap '' HUP TTOU
  end_leashes # they are to end with our parent
  PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:-} ${SSH_OPTS:-} -o BatchMode=yes -o ServerAliveInterval=2" \
    pdsh -R ssh -S -f "${#NODES[@]}" -t $((10 + SLACK)) -w "${NODES[*]}" "exec bash /tmp/launch.$TOKEN.%n/go" &
  wait $! 2>/dev/null || true
  for node in "${!NODES[@]}"; do echo "$node pdsh over" >&"$EVENTS"; done
}
