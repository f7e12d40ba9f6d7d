# shellcheck shell=bash disable=SC2154 # TOKEN is the run's
# What a node does for a run, in the bash at the far end of its connection, which brings this there.

# The agent takes its stdin as the control stream (launcher/control.py). What it prints goes one way,
# with a mark on the lines of stderr.
run_agent() { # <directory> <command...>
  cd -- "$1" && LEASH=$TOKEN LAUNCH_CONTROL=1 "${@:2}"
} 2> >(LEASH=$TOKEN exec sed -u "s/^/$TOKEN !/")

start_here() { # <node rank> <directory> <command...>
  run_agent "${@:2}"
  end_run "$?"
}

# Waits until nothing of the run is there, and ends what stays.
end_run() { # <the agent's code>
  local try left
  for try in {20..0}; do
    mapfile -t left < <(grep -lzs "^LEASH=$TOKEN" /proc/[0-9]*/environ)
    ((${#left[@]} && try)) || break
    sleep 0.1
  done
  left=("${left[@]//[!0-9]/}")
  kill -KILL "${left[@]}" 2>/dev/null
  echo "$TOKEN left ${#left[@]}"
  echo "$TOKEN code $1"
  exit
}

# pdsh starts the agent on a connection of its own, and forwards no stdin: this one feeds the leash,
# until pdsh's has ended, and shows what the agent prints.
start_by_pdsh() { # <node rank> <directory> <command...>
  local folder=/tmp/launch.$TOKEN.$1 feeder reader
  (umask 077 && mkdir -- "$folder") && cd -- "$folder" && mkfifo leash output over || exit
  { export -p && declare -p TOKEN && declare -f run_agent run_by_pdsh && echo "run_by_pdsh ${*@Q}"; } >go
  exec 3<>over
  cat <&0 1<>leash &
  feeder=$!
  LEASH=$TOKEN cat output &
  reader=$!
  echo "$TOKEN ready"
  until read -rt 1 <&3 || ! kill -0 "$feeder"; do :; done
  [[ ! -e ended ]] || echo "$TOKEN cut the connection of pdsh"
  kill "$feeder"
  [[ -s code ]] || read -rt 4 <&3 || kill "$reader"
  set -- "$(cat code || echo 137)"
  cd / && rm -r -- "$folder"
  end_run "$1"
} 2>/dev/null

run_by_pdsh() { # the same
  local folder=/tmp/launch.$TOKEN.$1 watch
  cd -- "$folder" && exec 3>over
  { cat && : >ended && echo >&3; } <&0 &>/dev/null &
  watch=$!
  run_agent "${@:2}" <leash >output 3>&-
  echo "$?" >"$folder/code"
  kill "$watch"
  echo >&3
}
