# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# One ssh connection to each node, private to the run: for the preflight, the launch, the clean-up.
#
# The far end is a bash that reads its commands from the connection, so that nothing stands in
# anyone's list of processes. What follows a launch is the agent's leash: a beat every 2 s, a
# signal's name to pass on, and at its end, however that came, the agent ends its node's part.
# What the nodes say to us, and not to the user, stands behind a token: a word, and a text.

declare -A SAID=() # ["<node rank> <word>"]=<text>
END_LINES='^FAILED   \(rank\|node agent\) \|^stopped  \(after saving a\|by SIG\)'
LEASH=()                     # by node rank: where to tell it something
LIMIT=$((SECONDS + 10 ** 9)) # when the leashes end: once some node has ended, or a signal has come

connect_nodes() {
  local node fd
  FOLDER=$(mktemp -d "${TMPDIR:-/tmp}/launch.XXXXXXXXXX")
  TOKEN=${FOLDER##*.}
  trap 'end_connections; rm -rf -- "$FOLDER"' EXIT
  mkfifo -- "$FOLDER/events"
  exec {EVENTS}<>"$FOLDER/events"
  ANSWER_BY=$((SECONDS + 9))
  for node in "${!NODES[@]}"; do
    mkfifo -- "$FOLDER/leash.$node" "$FOLDER/stderr.$node"
    hold_connection "$node" &
  done
  # Opened now, when no other process can inherit one: it must end with us.
  for node in "${!NODES[@]}"; do
    exec {fd}<>"$FOLDER/leash.$node"
    LEASH[node]=$fd
    tell "$node" "read -r _ _ address _ <<<\"\${SSH_CONNECTION:-}\"; echo $TOKEN hello \"\$address\""
  done
}

# In the background, where a terminal's Ctrl-C and its end reach nothing.
hold_connection() { # <node rank>
  trap - EXIT
  trap '' INT HUP
  show "$1" <"$FOLDER/stderr.$1" >&2 &
  ssh_node "$1" <"$FOLDER/leash.$1" 2>"$FOLDER/stderr.$1" | show "$1" || true
  rm -f -- "$FOLDER/pid.$1"
  wait
  kill -0 $$ 2>/dev/null || rm -rf -- "$FOLDER" # the launcher was killed
  echo "$1 ended -" >&"$EVENTS"
}

ssh_node() { # <node rank>
  local options
  read -ra options <<<"${SSH_OPTS:-}"
  echo "$BASHPID" >"$FOLDER/pid.$1"
  exec setsid ssh "${options[@]}" -T -x -a -o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=2 -o ServerAliveCountMax=3 \
    -o ControlMaster=no -o ControlPath=none -o ClearAllForwardings=yes -E "$FOLDER/ssh.$1" -- "${NODES[$1]}" "exec bash -s"
}

# Whole lines from a node to the user, to us, and how the run ended into a file: that comes last.
show() { # <node rank>
  sed -u -e "/^$TOKEN /{s//$1 /;w $FOLDER/events" -e 'd}' \
    -e "/$END_LINES/,\${w $FOLDER/end.$1" -e 'd}' -e "s/^/[$1] /"
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
  local file
  for file in "$FOLDER"/pid.*; do
    [[ ! -e $file ]] || kill "$(<"$file")" 2>/dev/null || true
  done
}

# A command for a node: waits until nothing of the run is there, and ends what stays.
sweep() {
  printf '%s' "for try in {20..0}; do mapfile -t left < <(grep -lzs '^LEASH=$TOKEN' /proc/[0-9]*/environ); " \
    "((\${#left[@]} && try)) || break; sleep 0.1; done; left=(\"\${left[@]//[!0-9]/}\"); " \
    "kill -KILL \"\${left[@]}\" 2>/dev/null; echo $TOKEN left \${#left[@]}"
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
