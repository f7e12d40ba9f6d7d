# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# Fan-out over ssh: one connection to each node, for the preflight, the launch and the clean-up.
#
# The far end is a bash that reads its commands from the connection, so that nothing stands in
# anyone's list of processes. What follows a launch is the agent's leash: a beat every 2 s, a
# signal's name to pass on, and at its end, however that came, the agent ends its node's part.
# What the nodes say to us, and not to the user, stands behind a token: a word, and a text.

# shellcheck source=scripts/lib/nodes.sh
source "$LIB/nodes.sh"

declare -A SAID=()           # ["<node rank> <word>"]=<text>
LEASH=()                     # by node rank: where to tell it something
JOBS=()                      # by node rank: what holds its connection
LIMIT=$((SECONDS + 10 ** 9)) # when the leashes end: once some node has ended, or a signal has come

fanout_check() {
  local node since now
  plan[checked_nodes]=${plan[nnodes]} plan[forwarded]=$(forwarded)
  read -r since _ </proc/uptime
  if [[ -n $DRY_RUN ]]; then
    preflight_command
    read_facts "$("${COMMAND[@]}")"
    return
  fi
  connect_nodes
  await hello
  if [[ -z ${MASTER_ADDR:-} && -n ${SAID["0 hello"]:-} ]] && ((plan[nnodes] > 1)); then
    plan[master]=${SAID["0 hello"]} # where we reach node 0
  fi
  for node in "${!NODES[@]}"; do
    plan[nproc]=${RANKS[node]}
    preflight_command
    tell "$node" "{ cd -- $(quote_line "$PWD") && $(exports)$(quote_line "${COMMAND[@]}" --node-rank "$node"); } \
</dev/null 2>&1 | sed 's/^/$TOKEN say /'; echo $TOKEN checked \${PIPESTATUS[0]}"
  done
  await checked
  read_answers
  read -r now _ </proc/uptime
  now=$((${now/./} - ${since/./}))
  printf -v "plan[seconds]" '%d.%02d' $((now / 100)) $((now % 100))
}

fanout_print() {
  local node first=0
  for node in "${!NODES[@]}"; do
    place_node "$node"
    printf '# node %s (%s): ranks %s-%s of %s, rendezvous %s:%s\n' "$node" "${NODES[node]}" "$first" \
      $((first += RANKS[node], first - 1)) "$(count_ranks)" "${plan[master]}" "${plan[port]}"
    quote_line ssh -- "${NODES[node]}" "cd $(quote_line "$PWD") && $(quote_line "${COMMAND[@]}")"
    echo
  done
}

fanout_start() {
  local node signal
  for signal in INT TERM HUP; do
    # shellcheck disable=SC2064 # now
    trap "hurry $((${GRACE:-30} + 10)); tell_all SIG$signal" "$signal"
  done
  for node in "${!NODES[@]}"; do
    place_node "$node"
    tell "$node" "cd -- $(quote_line "$PWD") && $(exports)env LEASH=$TOKEN.\$\$ $(quote_line "${COMMAND[@]}"); \
code=\$?; $(sweep); echo $TOKEN code \$code; exit"
  done
  until have_all ended || ((SECONDS > LIMIT + 10)); do
    hear 2 || tell_all "" # a beat
    for node in "${!NODES[@]}"; do
      if [[ -n ${SAID["$node code"]:-} ]]; then hurry 5; elif [[ -n ${SAID["$node ended"]:-} ]]; then hurry 0; fi
    done
    ((SECONDS < LIMIT)) || end_leashes
  done
  report_end
}

place_node() { # <node rank>
  plan[nproc]=${RANKS[$1]}
  node_command --nnodes "${plan[nnodes]}" --node-rank "$1" --master-addr "${plan[master]}"
}

# --- the connections ----------------------------------------------------------------------------

connect_nodes() {
  local node fd
  FOLDER=$(mktemp -d "${TMPDIR:-/tmp}/launch.XXXXXXXXXX")
  TOKEN=${FOLDER##*.}
  trap 'end_connections; rm -rf -- "$FOLDER"' EXIT
  mkfifo -- "$FOLDER/events"
  exec {EVENTS}<>"$FOLDER/events"
  ANSWER_BY=$((SECONDS + 8))
  set -m # jobs that a terminal's Ctrl-C does not reach
  for node in "${!NODES[@]}"; do
    mkfifo -- "$FOLDER/leash.$node" "$FOLDER/stderr.$node"
    hold_connection "$node" &
    JOBS[node]=$!
  done
  set +m
  # Opened now, when no other process can inherit one: it must end with us.
  for node in "${!NODES[@]}"; do
    exec {fd}<>"$FOLDER/leash.$node"
    LEASH[node]=$fd
    tell "$node" "read -r _ _ address _ <<<\"\${SSH_CONNECTION:-}\"; echo $TOKEN hello \"\$address\""
  done
}

hold_connection() { # <node rank>
  trap - EXIT
  show "$1" <"$FOLDER/stderr.$1" >&2 &
  ssh_node "$1" <"$FOLDER/leash.$1" 2>"$FOLDER/stderr.$1" | show "$1" || true
  wait
  echo "$1 ended -" >&"$EVENTS"
}

ssh_node() { # <node rank>
  local options
  read -ra options <<<"${SSH_OPTS:-}"
  ssh "${options[@]}" -T -x -a -o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=2 -o ServerAliveCountMax=3 \
    -o ControlMaster=no -o ControlPath=none -o ClearAllForwardings=yes -E "$FOLDER/ssh.$1" -- "${NODES[$1]}" "exec bash -s"
}

# Whole lines from a node to the user, to us, and how the run ended into a file: that comes last.
show() { # <node rank>
  sed -u -e "/^$TOKEN /{s//$1 /;w $FOLDER/events" -e 'd}' \
    -e "/^FAILED   \(rank\|node agent\) \|^stopped  \(after saving a\|by SIG\)/,\${w $FOLDER/end.$1" -e 'd}' -e "s/^/[$1] /"
}

tell() { # <node rank> <line>
  [[ -z ${LEASH[$1]:-} ]] || printf '%s\n' "$2" >&"${LEASH[$1]}"
}

tell_all() { # <line>
  local node
  for node in "${!LEASH[@]}"; do tell "$node" "$1"; done
}

# Takes one word from any node; fails where none comes in time.
hear() { # <seconds>
  local node word text
  read -r -t "$1" -u "$EVENTS" node word text || return
  if [[ $word == say ]]; then text=${SAID["$node say"]:-}$text$'\n'; fi
  SAID["$node $word"]=$text
}

# Until every node has said a word, or has gone, or the preflight's time is up.
await() { # <word>
  until have_all "$1" || ((SECONDS > ANSWER_BY)); do hear 1 || true; done
}

have_all() { # <word>
  local node
  for node in "${!NODES[@]}"; do
    [[ -n ${SAID["$node $1"]+said} || -n ${SAID["$node ended"]:-} ]] || return
  done
}

hurry() { # <seconds>
  ((SECONDS + $1 >= LIMIT)) || LIMIT=$((SECONDS + $1))
}

end_leashes() {
  local fd
  for fd in "${LEASH[@]}"; do exec {fd}>&-; done
  LEASH=()
}

end_connections() {
  local job
  for job in "${JOBS[@]}"; do kill -- "-$job" 2>/dev/null || true; done
}

# A command for a node: waits until nothing of the run is there, and ends what stays.
sweep() {
  printf '%s' "for try in {20..0}; do mapfile -t left < <(grep -lzs '^LEASH=$TOKEN' /proc/[0-9]*/environ); " \
    "((\${#left[@]} && try)) || break; sleep 0.1; done; left=(\"\${left[@]//[!0-9]/}\"); " \
    "kill -KILL \"\${left[@]}\" 2>/dev/null; echo $TOKEN left \${#left[@]}"
}

# --- what is told to the user -------------------------------------------------------------------

# The preflight's answers: the facts into the plan, what is wrong to the user, in one list.
read_answers() {
  local node line code refused='' warnings=0
  for node in "${!NODES[@]}"; do
    code=${SAID["$node checked"]:-}
    read_facts "${SAID["$node say"]:-}"
    case $code in
      0 | 3) grep -vE '^([a-z_]+=.*)?$' <<<"${SAID["$node say"]:-}" >&2 || true ;;
      "") explain_silence "$node" >&2 ;;
      *) printf '%s: %s: %s; %s\n' "$PROGRAM" "${NODES[node]}" "$(last_line <<<"${SAID["$node say"]}")" \
        "let $PWD, $ROOT and $PYTHON be there as they are here [env-missing]" >&2 ;;
    esac
    [[ $code == 0 ]] || refused=1
    ((warnings += plan[warnings])) || true
  done
  [[ -z $refused ]] || exit 3
  plan[warnings]=$warnings
}

explain_silence() { # <node rank>
  local said cure="see that 'ssh ${NODES[$1]} true' works without a question [ssh-refused]"
  said=$(last_line <"$FOLDER/ssh.$1")
  case $said in
    *"Could not resolve"*) cure="correct the name, or ~/.ssh/config [name-unresolved]" ;;
    *"timed out"* | *"No route"* | *unreachable* | "") cure="see that the machine is up [host-unreachable]" ;;
  esac
  printf '%s: %s: %s; %s\n' "$PROGRAM" "${NODES[$1]}" "${said:-no answer within 10 s}" "$cure"
}

last_line() {
  tr -d '\r' | sed '/^$/d' | tail -n 1
}

# Leaves with the run's code, after a last look at every node.
report_end() {
  local node code=0 left=0 lost=() block
  for node in "${!NODES[@]}"; do
    [[ -n ${SAID["$node code"]:-} ]] || lost+=("$node")
    ((code)) || code=${SAID["$node code"]:-0}
    ((left += ${SAID["$node left"]:-0})) || true
  done
  if ((${#lost[@]})); then report_lost "${lost[@]}"; fi
  ((left == 0)) || echo "$PROGRAM: $(count "$left" process processes) of the run had to be killed" >&2
  print_row ended "code $code; nothing is left running on $(count "${plan[nnodes]}" node)"
  for block in "$FOLDER"/end.*; do
    if [[ -s $block ]]; then cat -- "$block" >&2 && exit "$code"; fi
  done
  ((code == 0 || code == 2 || code == 3)) || print_block "[agent-killed]" 0 "$code" "the node agent has gone without a word"
  exit "$code"
}

# The connection to a node has ended, and not the node's part of the run: look there once more.
report_lost() { # <node rank...>
  local node said fault="[launcher-killed]" left
  said=$(last_line <"$FOLDER/ssh.$1")
  for node in "$@"; do
    left=$(sweep | ssh_node "$node" 2>/dev/null) || fault="[link-lost]"
  done
  print_row ended "code 137; nothing is left running where a node can be reached"
  print_block "$fault" "$1" 137 "the ssh connection has ended${said:+: $said}"
  exit 137
}

# As distributed/failure.py has it, where no agent could print it.
print_block() { # <[fault]> <node rank> <code> <cause>
  printf '%-8s %s\n' FAILED "node agent $2 (${NODES[$2]})       $1" cause "$4" \
    code "$3$( (($3 < 129)) || echo " (SIG$(kill -l $(($3 - 128))))")" others "the other nodes were stopped" \
    log "${LOG_DIR:-logs}/${plan[run_id]}/node_$2.log" \
    resume "RUN_ID=${plan[run_id]} $(launch_line)" see "TROUBLESHOOTING.md#${1//[][]/}" >&2
}

# Variables that go with a run by themselves, and those of FORWARD_ENV.
forwarded() {
  local name wanted=${FORWARD_ENV:-}
  for name in $(compgen -A export); do
    case $name in
      NCCL_* | GLOO_* | TORCH_* | OMP_* | WANDB_* | CUDA_VISIBLE_DEVICES) echo "$name" ;;
      *) [[ " ${wanted//,/ } " != *" $name "* ]] || echo "$name" ;;
    esac
  done
}

exports() {
  local name words=()
  for name in $(forwarded); do words+=("$name=${!name}"); done
  ((${#words[@]} == 0)) || printf 'export %s && ' "$(quote_line "${words[@]}")"
}
