# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# Fan-out over ssh: one agent on each node of NODES, all at once.

# shellcheck source=scripts/lib/nodes.sh
source "$LIB/nodes.sh"
# shellcheck source=scripts/lib/connection.sh
source "$LIB/connection.sh"

STOPPED= # the last signal that stopped the run

require_tools() { :; }

fanout_check() {
  local node there=() since now left
  plan[checked_nodes]=${plan[nnodes]} plan[forwarded]=$(forwarded)
  read -r since _ </proc/uptime
  if [[ -n $DRY_RUN ]]; then
    preflight_command
    read_facts "$("${COMMAND[@]}")"
    RANKS=("${RANKS[@]/auto/${plan[nproc]}}")
    return
  fi
  connect_nodes
  await hello $((ANSWER_BY - 3)) # and leave the others their time
  [[ -n ${MASTER_ADDR:-} || ${plan[nnodes]} == 1 ]] || take_master_address
  for node in "${!NODES[@]}"; do
    [[ -z ${SAID["$node hello"]+said} ]] || there+=("$node")
  done
  ((${#there[@]} == ${#NODES[@]})) || there=() # who has no time to wait for the others
  left=$((ANSWER_BY - SECONDS - 2))
  for node in "${!NODES[@]}"; do
    plan[nproc]=${RANKS[node]}
    preflight_command --node-rank "$node" --meet "${#there[@]}" --within $((left > 0 ? left : 1))
    tell "$node" "{ cd -- $(quote_line "$PWD") && $(exports)$(quote_line "${COMMAND[@]}"); } \
</dev/null 2>&1 | sed 's/^/$TOKEN say /'; echo $TOKEN checked \${PIPESTATUS[0]}"
  done
  await checked "$ANSWER_BY"
  read_answers
  read -r now _ </proc/uptime
  now=$((${now/./} - ${since/./}))
  printf -v "plan[seconds]" '%d.%02d' $((now / 100)) $((now % 100))
}

# Where ssh reaches node 0: an address, whatever an alias or a jump host is called.
take_master_address() {
  local node address=${SAID["0 hello"]:-}
  plan[master]=${address:-${plan[master]}}
  [[ $address == 127.* || $address == ::1 ]] || return 0
  for node in "${!NODES[@]}"; do
    [[ ${SAID["$node hello"]:-$address} == "$address" ]] ||
      refuse loopback-address "${NODES[0]}, the master, is $address, which ${NODES[node]} cannot reach; give its name on the network"
  done
}

fanout_print() {
  local node first=0
  for node in "${!NODES[@]}"; do
    place_node "$node"
    printf '# node %s (%s): ranks %s-%s of %s, rendezvous %s:%s\n' "$node" "${NODES[node]}" "$first" \
      $((first += RANKS[node], first - 1)) "$(count_ranks)" "${plan[master]}" "${plan[port]}"
    paste_line "${NODES[node]}" "cd $(quote_line "$PWD") && $(quote_line "${COMMAND[@]}")"
    echo
  done
}

paste_line() { # <node> <command>
  quote_line ssh -- "$@"
}

fanout_start() {
  start_nodes start_here
  watch_nodes
}

# On all nodes at once.
start_nodes() { # <function of node.sh>
  local node signal before
  for signal in INT TERM HUP; do
    # shellcheck disable=SC2064 # now
    trap "STOPPED=$signal; hurry $((${GRACE:-30} + 10)); tell_all SIG$signal" "$signal"
  done
  before=$NODE_CODE$(exports)
  for node in "${!NODES[@]}"; do
    place_node "$node"
    tell "$node" "$before$1 $(quote_line "$node" "$PWD" "${COMMAND[@]}")"
  done
}

watch_nodes() {
  until ((ENDED == ${#NODES[@]} || SECONDS > LIMIT + 10)); do
    if hear 2; then note_end "$HEARD"; else tell_all ""; fi # a beat
    ((SECONDS < LIMIT)) || end_leashes
  done
  report_end
}

place_node() { # <node rank>
  plan[nproc]=${RANKS[$1]}
  node_command --nnodes "${plan[nnodes]}" --node-rank "$1" --master-addr "${plan[master]}"
}

# Once one node has ended the others have 5 s; none, where one was lost.
note_end() { # <node rank>
  local lost=${SAID["$1 cut"]:-}
  if [[ -n ${SAID["$1 ended"]:-} && -z ${SAID["$1 code"]:-} ]]; then lost=${lost:-the ssh connection}; fi
  if [[ -n $lost && -z ${SAID["$1 lost"]:-} && ${#LEASH[@]} -gt 0 ]]; then
    lost+=" has ended: $(last_line <"$FOLDER/ssh.$1")"
    SAID["$1 lost"]=${lost%: }
    echo "$PROGRAM: ${NODES[$1]}: ${lost%: }" >&2
    hurry 0
  elif [[ -n ${SAID["$1 code"]:-}${SAID["$1 pdsh"]:-} ]]; then
    hurry 5
  fi
}

# --- what is told to the user -------------------------------------------------------------------

# The preflight's answers: the facts into the plan, what is wrong to the user, in one list.
read_answers() {
  local node code refused='' answers=''
  for node in "${!NODES[@]}"; do
    code=${SAID["$node checked"]:-}
    read_facts "${SAID["$node say"]:-}"
    [[ $code != [03] ]] || RANKS[node]=${plan[nproc]}
    case $code in
      0 | 3) grep -vE '^([a-z_]+=.*)?$' <<<"${SAID["$node say"]:-}" >&2 || true ;;
      "") explain_silence "$node" >&2 ;;
      *) printf '%s: %s: %s; %s\n' "$PROGRAM" "${NODES[node]}" "$(last_line <<<"${SAID["$node say"]}")" \
        "let $PWD, $ROOT and $PYTHON be there as they are here [env-missing]" >&2 ;;
    esac
    [[ $code == 0 ]] || refused=1
    answers+=${SAID["$node say"]:-}
  done
  compare_nodes "$answers" || refused=1
  [[ -z $refused ]] || exit 3
}

explain_silence() { # <node rank>
  local said cure="see that 'ssh ${NODES[$1]} true' works without a question [ssh-refused]"
  said=$(cat -- "$FOLDER/words.$1" "$FOLDER/ssh.$1" | last_line)
  if [[ -z ${SAID["$1 ended"]:-} && -n ${SAID["$1 hello"]+said} ]]; then
    said="its checks take longer than the preflight's time" cure="see what hangs there [host-unreachable]"
  elif [[ -z ${SAID["$1 ended"]:-} ]]; then
    said="no answer within $((ANSWER_BY - 3 - BEGAN)) s" cure="see that the machine is up, and a login there asks nothing [host-unreachable]"
  fi
  case $said in
    *"Could not resolve"*) cure="correct the name, or ~/.ssh/config [name-unresolved]" ;;
    *"timed out"* | *"No route"* | *unreachable*) cure="see that the machine is up [host-unreachable]" ;;
  esac
  printf '%s: %s: %s; %s\n' "$PROGRAM" "${NODES[$1]}" "${said:-the connection ended without a word}" "$cure"
}

last_line() {
  tr -d '\r' | sed '/^$/d' | tail -n 1
}

# Leaves with the run's code, after a last look at every node.
report_end() {
  local node code=0 left=0 lost=() block
  for node in "${!NODES[@]}"; do
    [[ -n ${SAID["$node code"]:-} && -z ${SAID["$node lost"]:-} ]] || lost+=("$node")
    ((code)) || code=${SAID["$node code"]:-0}
    ((left += ${SAID["$node left"]:-0})) || true
  done
  if ((${#lost[@]})); then report_lost "${lost[@]}"; fi
  ((left == 0)) || echo "$PROGRAM: $(count "$left" process processes) of the run had to be killed" >&2
  print_row ended "code $code; nothing is left running on $(count "${plan[nnodes]}" node)"
  ((code != 0 && code != 2 && code != 3)) || exit "$code" # who refused the run has said so
  for block in "$FOLDER"/end.*; do
    if [[ -s $block ]]; then cat -- "$block" >&2 && exit "$code"; fi
  done
  report_silence "$code"
  exit "$code"
}

# No agent has told why.
report_silence() { # <code>
  local engine=${plan[engine]:-}
  if [[ -n $STOPPED && -n $engine ]]; then
    printf '%-8s %s\n' stopped "by SIG$STOPPED (code $1); nothing is left running" \
      resume "RUN_ID=${plan[run_id]} $(launch_line)" >&2
  elif [[ -n $engine ]]; then
    print_block "[rank-error]" "a rank of $engine" "$1" "it ended with an error; $engine's own report stands above"
  else
    print_block "[agent-killed]" "node agent 0 (${NODES[0]})" "$1" "the node agent has gone without a word"
  fi
}

# The connection to a node has ended, and not the node's part of the run: look there once more.
report_lost() { # <node rank...>
  local node fault="[launcher-killed]"
  for node in "$@"; do
    (trap '' INT TERM && ssh_node "$node") <<<"${NODE_CODE}end_run 0" &>/dev/null || {
      fault="[link-lost]"
      echo "$PROGRAM: ${NODES[node]}: $(last_line <"$FOLDER/ssh.$node")" >&2
    }
  done
  print_row ended "code 137; nothing is left running where a node can be reached"
  print_block "$fault" "node agent $1 (${NODES[$1]})" 137 "${SAID["$1 lost"]:-the ssh connection has ended}" \
    "${LOG_DIR:-logs}/${plan[run_id]}/node_$1.log"
  exit 137
}

# As launcher/failure.py has it, where no agent could print it.
print_block() { # <[fault]> <who> <code> <cause> [<log>]
  printf '%-8s %s\n' FAILED "$2       $1" cause "$4" \
    code "$3$( (($3 < 129)) || echo " (SIG$(kill -l $(($3 - 128))))")" others "the other nodes were stopped" \
    ${5:+log "$5"} resume "RUN_ID=${plan[run_id]} $(launch_line)" see "TROUBLESHOOTING.md#${1//[][]/}" >&2
}
