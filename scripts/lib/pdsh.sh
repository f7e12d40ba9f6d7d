# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# Fan-out through pdsh, which starts the agents. It forwards no stdin, and what it is given shows in
# the list of processes: so the connections of ssh.sh put the command there, and hold the leashes.

# shellcheck source=scripts/lib/ssh.sh
source "$LIB/ssh.sh"

require_pdsh() {
  [[ -n $DRY_RUN ]] || type -P pdsh >/dev/null ||
    refuse env-missing "there is no pdsh here; install it, or use launch_torchrun_auto.sh"
}

paste_line() { # <node> <command>
  quote_line pdsh -R ssh -S -w "$1" "${2//%/%%}"
}

# In a private folder: the command, the leash, and a pipe for its code. The connection feeds the
# leash until the command is over; it ends it where pdsh's own connection to this node has ended.
start_node() { # <node rank> <command>
  local folder=/tmp/launch.$TOKEN.$1 go
  go="exec 5<&0; { cat <&5 >/dev/null; >$folder/cut; kill \$(<$folder/feeder); } 2>/dev/null & { { $2 <$folder/leash; echo \$? >$folder/code; } \
2>&1 1>&3 | sed -u -e '/$END_LINES/,\${w $folder/end' -e 'd}' -e 's/^/[$1] /' >&2; } 3>&1 | sed -u 's/^/[$1] /'; \
kill \$!; echo \$(<$folder/code) >$folder/over"
  tell "$1" "umask 077; mkdir $folder && cd $folder && mkfifo leash over && printf '%s\n' $(quote_line "$go") >go; \
exec 3<&0 4<>over; cat <&3 1<>leash 2>/dev/null & echo \$! >feeder; echo $TOKEN ready; \
until read -rt 1 code <&4 || ! kill -0 \$! 2>/dev/null; do :; done; \
[[ \$code ]] || read -rt 4 code <&4 || code=137; [[ ! -e cut ]] || echo $TOKEN cut the connection of pdsh; \
kill \$! 2>/dev/null; cat end >&2; cd /; rm -r $folder; $(sweep); echo $TOKEN code \$code; exit"
}

all_started() {
  ANSWER_BY=$((SECONDS + 8))
  await ready
  run_pdsh </dev/null &
}

run_pdsh() {
  local IFS=, node
  trap - EXIT
  trap '' INT HUP
  end_leashes # they are to end with our parent
  PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:-} ${SSH_OPTS:-} -o BatchMode=yes -o ServerAliveInterval=2" \
    setsid pdsh -R ssh -S -N -f "${#NODES[@]}" -w "${NODES[*]}" "exec bash /tmp/launch.$TOKEN.%n/go" || true
  for node in "${!NODES[@]}"; do echo "$node pdsh over" >&"$EVENTS"; done
}
