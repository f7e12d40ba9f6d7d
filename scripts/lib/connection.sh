# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# One ssh connection to each node, private to the run: for the preflight, the launch, the clean-up.
#
# The far end is a bash that reads its commands from the connection, so that nothing stands in
# anyone's list of processes. What follows a launch is the agent's leash: a beat every 2 s, a
# signal's name to pass on, and at its end, however that came, the agent ends its node's part.
# What the nodes say to us, and not to the user, stands behind a token: a word, and a text.

declare -A SAID=()           # ["<node rank> <word>"]=<text>
HEARD=                       # the node rank that said the last word
BEGUN=                       # of a line that has not come to its end
ENDED=0                      # connections
LEASH=()                     # by node rank: where to tell it something
SLACK=0                      # seconds more for many nodes: each key exchange takes some of our time
LIMIT=$((SECONDS + 10 ** 9)) # when the leashes end: once some node has ended, or a signal has come

connect_nodes() {
  local node fd ranks=("${!NODES[@]}")
  type -P ssh >/dev/null || refuse env-missing "there is no ssh here; install OpenSSH's client"
  FOLDER=$(mktemp -d "${TMPDIR:-/tmp}/launch.XXXXXXXXXX" 2>/dev/null) ||
    refuse dir-unwritable "cannot write to ${TMPDIR:-/tmp}; set TMPDIR"
  TOKEN=${FOLDER##*.}
  NODE_CODE="TOKEN=$TOKEN"$'\n'$(<"$LIB/node.sh")$'\n' # what a node's bash is to know
  trap end_connections EXIT
  mkfifo -- "$FOLDER/events" "${ranks[@]/#/$FOLDER/leash.}"
  touch -- "${ranks[@]/#/$FOLDER/words.}" "${ranks[@]/#/$FOLDER/ssh.}"
  exec {EVENTS}<>"$FOLDER/events"
  SLACK=$((${#NODES[@]} / 10))
  BEGAN=$SECONDS ANSWER_BY=$((SECONDS + 9 + SLACK))
  apart hold_connections
  # Opened now, when no other process can inherit one: it must end with us.
  for node in "${ranks[@]}"; do
    exec {fd}<>"$FOLDER/leash.$node"
    LEASH[node]=$fd
    tell "$node" "read -r _ _ address _ <<<\"\${SSH_CONNECTION:-}\"; echo $TOKEN hello \"\$address\""
  done
}

# In a process group of its own, where neither a terminal's Ctrl-C comes nor what `timeout`, or
# whoever else signals our whole group, sends.
apart() { # <function>
  set -m
  "$1" </dev/null &
  set +m
}

hold_connections() {
  local node
  # A terminal's end must not end it; and it is written to from here.
  trap '' HUP TTOU
  trap 'kill $(jobs -p) 2>/dev/null || true' TERM # each ssh
  for node in "${!NODES[@]}"; do
    # What start-up files say, and why ssh would not start, is kept for explain_silence.
    ssh_node "$node" <"$FOLDER/leash.$node" 2>"$FOLDER/words.$node" | show "$node" &
  done
  wait 2>/dev/null || true
  [[ -e /proc/$$/exe ]] || rm -rf -- "$FOLDER" # the launcher was killed
}

ssh_node() { # <node rank>
  local options
  read -ra options <<<"${SSH_OPTS:-}"
  exec ssh "${options[@]}" -T -x -a -o BatchMode=yes -o ConnectTimeout=$((5 + SLACK)) -o ServerAliveInterval=2 -o ServerAliveCountMax=3 \
    -o ControlMaster=no -o ControlPath=none -o ClearAllForwardings=yes -E "$FOLDER/ssh.$1" -- "${NODES[$1]}" "exec bash -s"
}

# Whole lines from a node, to us and to the user, if he still listens. How the run ended goes into a
# file: that comes last.
show() { # <node rank>
  local line prefix="[$1] "
  trap '' PIPE
  while IFS= read -r line || [[ -n $line ]]; do
    case $line in
      "$TOKEN "[a-z]*) echo "$1 ${line#* }" >&"$EVENTS" ;;
      "$TOKEN !FAILED   rank "* | "$TOKEN !FAILED   node agent "* | \
        "$TOKEN !stopped  after saving a"* | "$TOKEN !stopped  by SIG"*)
        exec 2>"$FOLDER/end.$1"
        prefix=
        ;;&
      "$TOKEN !"*) printf '%s\n' "$prefix${line#*!}" >&2 || true ;;
      *) printf '%s\n' "[$1] $line" 2>/dev/null || true ;;
    esac
  done
  echo "$1 ended -" >&"$EVENTS"
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
  local line word text
  IFS= read -r -t "$1" -u "$EVENTS" line || {
    BEGUN+=$line # the time was up amid a line
    return 1
  }
  read -r HEARD word text <<<"$BEGUN$line"
  BEGUN=
  case $word in
    say) text=${SAID["$HEARD say"]:-}$text$'\n' ;;
    ended) ENDED=$((ENDED + 1)) ;;
  esac
  SAID["$HEARD $word"]=$text
}

# Until every node has said a word, or has gone, or the time is up.
await() { # <word> <until>
  local node
  for node in "${!NODES[@]}"; do
    until [[ -n ${SAID["$node $1"]+said}${SAID["$node ended"]:-} ]] || ((SECONDS > $2)); do
      hear 1 || true
    done
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
  # shellcheck disable=SC2046 # numbers
  kill $(jobs -p) 2>/dev/null || true
  rm -rf -- "$FOLDER"
}

# Variables that go with a run by themselves, those that its environment has changed, and FORWARD_ENV's.
forwarded() {
  local name wanted="${FORWARD_ENV:-} ${ACTIVATED[*]}"
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
