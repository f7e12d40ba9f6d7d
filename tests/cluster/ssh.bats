#!/usr/bin/env bats
# The launchers over ssh, with real sshds.
# shellcheck disable=SC2030,SC2031 # each test is a subshell, and is meant to be
bats_require_minimum_version 1.5.0
load helper
load ../scripts/helper

LAUNCH=scripts/ssh/launch_torchrun_auto.sh
SMALL=(train.eval_every=0 train.global_batch_size=12 model.layers=1 model.width=16 checkpoint.every=0)
SHORT=(train.max_steps=6 "${SMALL[@]}")
LONG=(train.max_steps=100000 "${SMALL[@]}")
HOSTS=(node1 node2)
((${TIMES:-1} == 1)) || HOSTS+=(node3 node4)

setup_file() {
  cluster_up 4
}

teardown_file() {
  cluster_down
}

setup() {
  cd -- "$BATS_TEST_TMPDIR" || return
  ln -s -- "$ROOT"/{config,scripts} .
  mkdir tmp
  export OMP_NUM_THREADS=1 TMPDIR=$PWD/tmp
  export PREFLIGHT_SECONDS=20 # a busy machine may need more than the usual 9 for four nodes
}

launch() { # <argument...>
  timeout "${LIMIT_S:-300}" "$CLUSTER" run login "$LAUNCH" "$@"
}

weights_of() { # <run id>
  run_ours "$PYTHON" -m distributed.checkpoint hash "$PWD/checkpoints/$1"
}

run_ours() { # <command...>
  (cd -- "$ROOT" && "$@")
}

# Creates idle.py, which joins the other ranks; then it sleeps if its argument is idle, or spins.
make_idle() {
  cat >idle.py <<'PY'
import sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("met", flush=True)
while True:
    time.sleep(600 if sys.argv[1] == "idle" else 0)
PY
}

# Starts run $1 on node1 and node2 in the background, and waits until its ranks have met.
start() { # <run id> <the launcher's arguments...>
  RUN_ID=$1 launch "${@:2}" >"$1.out" 2>&1 3>&- &
  PID=$!
  eventually grep -qE '^\[0\] (met|step 1/|after )' "$1.out" || { cat "$1.out" && false; }
}

is_gone() { # <run id>
  local node
  for node in "${HOSTS[@]}"; do
    ! on "$node" pgrep -f "rdzv-id $1 " || return
  done
}

launcher_of() { # <its last argument>
  on login pgrep -o -f "/start.py launch_.* $1$"
}

# Prints the process to kill.
find_victim() { # <run id> <host> <rank|agent|sshd|pdsh>: the last is the sshd of pdsh's connection
  local pid
  pid=$(on "$2" pgrep -o -f "rdzv-id $1 ")
  [[ $3 != pdsh ]] || pid=$(on "$2" pgrep -o -f 'far_side --pdsh ')
  case $3 in
    agent) on "$2" pgrep -P "$pid" ;;
    rank) on "$2" pgrep -n -P "$(on "$2" pgrep -P "$pid")" ;;
    *)
      until [[ $(on "$2" ps -o comm= -p "$pid") == sshd ]]; do pid=$(($(on "$2" ps -o ppid= -p "$pid"))); done
      echo "$pid"
      ;;
  esac
}

# Kills one process of a run at a random moment; adds to TOOK the milliseconds until all are gone.
kill_one() { # <rank|agent|sshd|pdsh|launcher> <run id> <idle|busy> <fault> <who is named>
  local place=$((RANDOM % ${#HOSTS[@]})) host=login victim began who
  LAUNCH=scripts/ssh/launch_torchrun_auto.sh
  if [[ $1 == pdsh ]]; then LAUNCH=scripts/ssh/launch_pdsh_multinode.sh; fi
  start "$2" - 1 "${HOSTS[@]}" -- "$3" "$2"
  if [[ $1 == launcher ]]; then
    victim=$(launcher_of "$2")
  else
    host=${HOSTS[place]}
    victim=$(find_victim "$2" "$host" "$1")
  fi
  sleep "0.$((RANDOM % 10))" # the random moment itself
  began=${EPOCHREALTIME/./}
  on "$host" kill -KILL "$victim"
  eventually is_gone "$2"
  TOOK+=($(((${EPOCHREALTIME/./} - began) / 1000)))
  end_of "$PID"
  cat "$2.out"
  ((CODE == 137))
  [[ $1 != launcher ]] || return 0
  [[ $(grep -c '^FAILED ' "$2.out") == 1 ]]
  who=${5/P/$place}
  grep -q "^FAILED   ${who/nodeP/$host} .*\[$4\]$" "$2.out"
  grep -q '^ended      code 137; nothing is left running' "$2.out"
}

# Trains on node1 to nodeN, with two ranks each; the weights must equal those of one machine.
train_equally() { # <script> <N>
  local hosts=(node1 node2 node3) id=${1##*/}-$2 node
  hosts=("${hosts[@]::$2}")
  LAUNCH=scripts/$1.sh
  case $1 in
    pbs/*)
      printf '%s\n' "${hosts[@]}" "${hosts[@]}" >nodes
      RUN_ID=$id PBS_JOBID=7.pbs PBS_NODEFILE=nodes launch config/local3.yaml "${SHORT[@]}"
      ;;
    */launch_torchrun_multinode)
      for ((node = $2 - 1; node > 0; node--)); do
        timeout 300 "$CLUSTER" run "${hosts[node]}" "$LAUNCH" config/local3.yaml 2 "$2" "$node" node1 "${SHORT[@]}" 3>&- &
      done
      RUN_ID=$id timeout 300 "$CLUSTER" run node1 "$LAUNCH" config/local3.yaml 2 "$2" 0 node1 "${SHORT[@]}"
      wait
      ;;
    *)
      if [[ $1 == */launch_pdsh_multinode ]]; then hosts=("${hosts[@]/#node/${V6:-node}}"); fi
      RUN_ID=$id launch config/local3.yaml 2 "${hosts[@]}" "${SHORT[@]}"
      ;;
  esac
  [[ $(weights_of "$id") == "$(weights_of "alone-$2")" ]]
}

# bats test_tags=prove,long
@test "2 x 2 and 3 x 2 end with the same weights as one machine, under each launcher" {
  local script number V6=fd00::
  on node1 timeout 2 bash -c "</dev/tcp/fd00::2/22" || { V6= && echo "# this machine has no IPv6" >&3; }
  for number in 2 3; do
    RUN_ID=alone-$number SKIP_PREFLIGHT=1 scripts/ssh/launch_singlenode.sh config/local3.yaml $((number * 2)) "${SHORT[@]}"
  done
  for script in ssh/launch_{torchrun_auto,pdsh_multinode,multinode,torchrun_multinode} pbs/pbs_train; do
    if [[ -n ${TIMES:-} || $script != pbs/* ]]; then train_equally "$script" 2; fi
    if [[ -n ${TIMES:-} || $script == pbs/* ]]; then train_equally "$script" 3; fi
  done
}

# Cuts off node2: the run, whose launcher is PID, ends everywhere and names node2.
end_by_a_cut() { # NAME PID
  "$CLUSTER" cut node2
  end_of "$2"
  eventually is_gone "$1" # node2 ends its processes by itself
  "$CLUSTER" restore node2
  cat "$1.out"
  ((CODE == 137))
  grep -q '^FAILED   node agent 1 (node2) .*\[link-lost\]$' "$1.out"
}

# Of all launchers, only one is left on login, and the others left no files.
only_one_is_left() {
  is_empty tmp && [[ $(on login pgrep -f "ssh .*node1 exec bash" | wc -l) == 1 ]]
}

# bats test_tags=prove
@test "a death or a cut anywhere ends the run on all nodes and is named; another run continues" {
  make_idle
  export TRAIN_SCRIPT=idle.py
  LIMIT_S=$((3600 * ${TIMES:-1})) SILENCE_SECONDS=10 start neighbour - 1 "${HOSTS[@]}" -- idle # it outlives the others
  local neighbour=$PID what fault who number longest work=idle
  while read -r what fault who; do
    TOOK=()
    for ((number = 0; number < ${TIMES:-1}; number++)); do
      if [[ $work == idle && (-n ${TIMES:-} || $what == rank) ]]; then work=busy; else work=idle; fi
      kill_one "$what" "$what-$number" "$work" "$fault" "$who"
    done
    longest=$(printf '%s\n' "${TOOK[@]}" | sort -n | tail -n 1)
    echo "# kill -9 of one $what in a run on ${#HOSTS[@]} nodes, ${#TOOK[@]} times: all processes gone within $longest ms" >&3
    [[ -z ${TIMES:-} ]] || ((longest < 2000)) # `make test` may share the machine: it measures nothing
  done <<'TABLE'
rank rank-killed rank P (local rank 0, nodeP)
agent agent-killed node agent P (nodeP)
sshd launcher-killed node agent P (nodeP)
pdsh launcher-killed node agent P (nodeP)
launcher - -
TABLE
  eventually only_one_is_left
  kill -0 "$neighbour"
  run ! is_gone neighbour
  end_by_a_cut neighbour "$neighbour"
  # 10 s, or down to 8 s if node2's last message to the other agent was up to 2 s older.
  local silence='([89]|10)'
  [[ -n ${TIMES:-} ]] || silence='([89]|1[0-9])' # `make test` may share the machine
  grep -qE "^launch_torchrun_auto.sh: node2: no heartbeat for $silence s \(network down\?\)" neighbour.out
  grep -q '^launch_torchrun_auto.sh: node2: ssh: connect to host node2 port 22: ' neighbour.out # the cause
}

# bats test_tags=prove,long
@test "MAX_RESTARTS: all nodes restart after a death, and end with an undisturbed run's weights" {
  local settings=(train.max_steps=150 "${SMALL[@]}" checkpoint.every=25)
  export MAX_RESTARTS=1
  start again config/local3.yaml 2 node1 node2 "${settings[@]}"
  on node2 kill -KILL "$(find_victim again node2 rank)"
  end_of "$PID"
  cat again.out
  ((CODE == 0))
  grep -q '^\[0\] node agent: setting GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME==eth0 (= before a name: only this one)$' again.out
  grep -q '^\[0\] node agent: restart 1 of 1 after rank [23] .*SIGKILL' again.out
  RUN_ID=never on node1 scripts/ssh/launch_singlenode.sh config/local3.yaml 4 "${settings[@]}"
  [[ $(weights_of again) == "$(weights_of never)" ]]
}

# bats test_tags=prove,long
@test "SIGINT and SIGTERM at random moments save first, on every node" {
  local signal number
  for signal in INT TERM; do
    for ((number = 0; number < ${TIMES:-1}; number++)); do
      start "$signal-$number" config/local3.yaml 1 "${HOSTS[@]}" "${LONG[@]}"
      sleep "0.$((RANDOM % 10))" # the random moment itself
      on login kill "-$signal" "$(launcher_pid "$signal-$number")"
      end_of "$PID"
      cat "$signal-$number.out"
      ((CODE == 75))
      is_gone "$signal-$number"
      run_ours "$PYTHON" -m distributed.checkpoint verify "$PWD/checkpoints/$signal-$number"
    done
    echo "# SIG$signal to the launcher of a run on ${#HOSTS[@]} nodes, $number times: saved, code 75, no process left" >&3
  done
  # Signals sent to timeout go to the launcher's whole group.
  local launcher
  for launcher in torchrun_auto pdsh_multinode; do
    printf '#!/bin/sh\nexec timeout 1000 scripts/ssh/launch_%s.sh "$@"\n' "$launcher" >limited
    chmod +x limited
    LAUNCH=./limited start "$launcher" config/local3.yaml 1 "${HOSTS[@]}" "${LONG[@]}"
    on login kill -TERM "$(on login pgrep -f "^timeout 1000 ")"
    end_of "$PID"
    cat "$launcher.out"
    ((CODE == 75))
    is_gone "$launcher"
  done
}

# bats test_tags=prove,long
@test "the page's loop, stopped and killed at random moments, ends with an unbroken run's weights" {
  local number times=$((${TIMES:-1} * 2)) codes=(75 137 137) words
  LAUNCH=scripts/launch.sh words=(--hosts "node1,node2" --nproc-per-node 1 page.py $((times * 100)) ddp 2)
  make_page_loop
  RUN_ID=whole launch "${words[@]}" 0
  for ((number = 0; number < times; number++)); do
    start broken "${words[@]}" 0.01
    sleep "0.$((RANDOM % 5))" # the random moment itself
    case $((number % 3)) in
      0) on login kill -TERM "$(launcher_pid broken)" ;;
      1) on node2 kill -KILL "$(find_victim broken node2 rank)" ;;
      2) on login kill -KILL "$(launcher_pid broken)" ;;
    esac
    end_of "$PID"
    eventually is_gone broken
    ((CODE == codes[number % 3])) || { cat broken.out && false; }
  done
  RUN_ID=broken launch "${words[@]}" 0
  [[ $(weights_of broken) == "$(weights_of whole)" ]]
  echo "# the loop of docs/your-script.md over ssh, stopped or killed $times times: the weights of an unbroken run" >&3
}

# bats test_tags=prove
@test "an ordinary script completes every time, on one machine, over ssh and through pdsh" {
  local number times=$((${TIMES:-0} ? TIMES * 5 / 2 : 1)) script scripts=(torchrun_auto pdsh_multinode)
  [[ -z ${TIMES:-} ]] || scripts+=(singlenode) # otherwise, tests/unit/test_shapes.py tests it
  make_ordinary
  export TRAIN_SCRIPT=ordinary.py
  for script in "${scripts[@]}"; do
    local words=(- 1 node1 node2)
    [[ $script != singlenode ]] || words=(- 2)
    for ((number = 0; number < times; number++)); do
      LAUNCH=scripts/ssh/launch_$script.sh launch "${words[@]}" >ordinary.out 2>&1 || { cat ordinary.out && false; }
      grep -q 'all 2$' ordinary.out
    done
    echo "# an ordinary script under launch_$script.sh: $times of $times runs completed" >&3
  done
}

# bats test_tags=prove,long
# A program replaces the agents, and ends once all nodes are running it. ssh's remote end forks it.
@test "64 nodes start at once over ssh, and 40 through pdsh" {
  mkdir root
  cp -rs "$ROOT"/{launcher,distributed,scripts} root
  rm root/launcher/agent/agent.py
  cat >root/launcher/agent/agent.py <<'PY'
import os
from launcher.command_line import find_option

def run_agent(arguments, environ, link):
    place = environ["PLACE"]
    os.execlp("bash", "bash", "-c", environ["AGENT"], place, find_option(arguments, "--nnodes"))
PY
  cat >all.py <<'PY'
import os, sys
from pathlib import Path
from dataclasses import replace
from job_tools import USUAL
from launcher.fanout import pdsh, ssh
from launcher.plan.plan import NodePlan, Plan

FANOUTS = {"ssh": ssh.SshFanout, "pdsh": pdsh.PdshFanout}
root, fanout, *nodes = sys.argv[1:]


class All(FANOUTS[fanout]):
    def start_request(self, report, one):
        start = super().start_request(report, one)
        own = {"AGENT": os.environ["AGENT"], "PLACE": fanout}
        return replace(start, variables={**start.variables, **own})


here = Path.cwd()
node_plans = [NodePlan(node, 1) for node in nodes]
plan = Plan(program="all.py", fanout=fanout, command="", root=Path(root), python=sys.executable,
            directory=here, log_dir=here / "logs", run_id="all", words=["all.py"],
            nodes=node_plans, num_nodes=len(nodes), master_addr="node1", environ=os.environ,
            **{**USUAL, "preflight_s": 600})
sys.exit(All(plan).run(lambda: None))
PY
  export CLUSTER_DIR=$BATS_TEST_TMPDIR/cluster
  "$CLUSTER" up 64
  # shellcheck disable=SC2016 # expanded by the agents
  export PYTHONPATH=$ROOT:$ROOT/tests/unit AGENT='echo >>"$0"; until mapfile there <"$0" && ((${#there[@]} == $1)); do sleep 0.3; done'
  # shellcheck disable=SC2016 # expanded by the inner bash
  run timeout 1200 "$CLUSTER" run login bash -c '"$PYTHON" all.py "$PWD/root" pdsh node{1..40}; "$PYTHON" all.py "$PWD/root" ssh node{1..64}'
  "$CLUSTER" down
  [[ $status == 0 && $(grep '^ended' <<<"$output") == "ended      code 0; nothing is left running on 40 nodes
ended      code 0; nothing is left running on 64 nodes" ]]
}

# Creates terminal.py, which runs a command in a terminal and presses Ctrl-C at its first step.
make_terminal() {
  cat >terminal.py <<'PY'
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
shown = b""
try:
    while data := os.read(terminal, 4096):
        if b"step 1/" in data and b"step 1/" not in shown:
            os.write(terminal, b"\x03")
        shown += data
except OSError:  # the terminal is closed
    pass
print(shown.decode())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) # 254: it died by SIGINT
PY
}

# bats test_tags=long
@test "Ctrl-C ends what a line pasted from --dry-run has started on a node" {
  make_terminal
  local line
  line=$(RUN_ID=pasted "$CLUSTER" run login "$LAUNCH" config/local3.yaml 1 node1 "${LONG[@]}" --dry-run | tail -n 1)
  NO_COLOR=1 run timeout 300 "$CLUSTER" run login "$PYTHON" terminal.py bash -c "$line" </dev/null
  [[ $output == *"stopped  by SIG"*" after saving a checkpoint "* ]]
  is_gone pasted
}

@test "Ctrl-C in a terminal saves first; a second one kills" {
  make_terminal
  RUN_ID=saves NO_COLOR=1 run -254 timeout 300 "$CLUSTER" run login "$PYTHON" terminal.py "$LAUNCH" config/local3.yaml 2 node1 node2 "${LONG[@]}" </dev/null
  is_gone saves
  [[ -d checkpoints/saves/latest/. && $output == *$'^C[0] stopped    after step '*$'\nstopped  by SIGINT after saving a checkpoint '*$'\nresume   RUN_ID=saves '* ]]
  cat >deaf.py <<'PY'
import signal, time
import torch.distributed as dist
for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, signal.SIG_IGN)
dist.init_process_group("gloo")
print("met", flush=True)
time.sleep(600)
PY
  GRACE=600 TRAIN_SCRIPT=deaf.py start deaf - 1 node1 node2 -- deaf
  on login kill -TERM "$(launcher_of deaf)"
  on login kill -INT "$(launcher_of deaf)"
  sleep 1 # two within 0.3 s count as one
  run ! is_gone deaf
  on login kill -INT "$(launcher_of deaf)"
  eventually is_gone deaf
  end_of "$PID"
  ((CODE == 143))
}

# bats test_tags=slow
shows_ranks() { # <output>
  on login kill -QUIT "$(launcher_of idle)"
  eventually grep -q "^.0. *ranks 0-3: idle.py:7 in <module>" "$1"
}

# bats test_tags=prove,long
@test "Ctrl-\\ shows the stacks of all ranks, over ssh and through pdsh; so does --stacks, from elsewhere" {
  make_idle
  local script
  for script in launch_torchrun_auto launch_pdsh_multinode; do
    LAUNCH=scripts/ssh/$script.sh
    TRAIN_SCRIPT=idle.py start "$script" - 2 node1 node2 -- idle
    eventually shows_ranks "$script.out" # the first time, a rank may not exist yet
    run on node3 "$LAUNCH" --stacks "$script"
    [[ $status == 0 && ${lines[1]} == "  ranks 0-3: idle.py:7 in <module>" ]]
    on login kill -TERM "$(launcher_of idle)"
    end_of "$PID"
    is_gone idle
  done
}

# bats test_tags=prove,long
@test "a run id in use, a stop before the first rank, a terminal that blocks" {
  make_idle
  export TRAIN_SCRIPT=idle.py
  start live - 1 node1 node2 -- idle
  local live=$PID
  RUN_ID=live run launch - 1 node1 node3 -- idle
  [[ $status == 3 && $output == *"login: run live is live: process "*"[run-is-live]" ]]
  RUN_ID=live LOG_DIR=other run launch - 1 node1 node3 -- idle
  [[ $status == 3 && $output == *"node1: run live is live: its node agent is running here; "*"[run-is-live]" ]]
  rm logs/live/run.json # the launcher's disk may not be that of the nodes
  RUN_ID=live MASTER_PORT=4323 run launch - 1 node3 node2 -- idle
  echo "$output"
  [[ $status == 3 && $output == *"run live is live: "*" on node1; "*"[run-is-live]"*$'\n'"ended      code 3; "* && $output != *FAILED* ]]
  on login kill -TERM "$(launcher_of idle)"
  end_of "$live"
  ((CODE == 143))

  RUN_ID=early launch - 1 node1 node2 -- idle >early.out 2>&1 3>&- &
  PID=$!
  eventually is_started early
  on login kill -INT "$(launcher_of idle)"
  end_of "$PID"
  cat early.out
  ((CODE == 130))
  [[ $(tail -n 1 early.out) == "stopped  by SIGINT"*" (code 130); nothing is left running" ]]

  echo "print('x' * 10**6)" >idle.py
  launch - 1 node1 node2 >/dev/full 2>full.out
  [[ $(tail -n 1 full.out) == "ended      code 0; nothing is left running on 2 nodes" ]]
}

# After the preflight, the process started by ssh forks the agent.
is_started() { # <run id>
  grep -q '^logs ' "$1.out" && (($(on node1 pgrep -c -f "rdzv-id $1 ") == 2))
}

@test "test_distributed.sh verifies several nodes together" {
  export LOG_DIR=$PWD/logs
  LAUNCH=scripts/test_distributed.sh launch 2 node1 node2:1 --test basic | tee out
  grep -qE '^\[0\] node2 +2  cpu ' out
  grep -q '^\[0\] PASS  3 ranks on 2 nodes, gloo: ' out
}

# bats test_tags=prove,long
@test "a detached run outlives its terminal, and the guide's commands stop it" {
  local commands
  # shellcheck disable=SC2016 # the backquotes of a code block
  mapfile -t commands < <(sed -n '/^### Without the terminal$/,/^## /p' "$ROOT/LAUNCH_GUIDE.md" |
    sed -n '/^```bash$/,/^```$/{/^```/!{s/ *#.*//;p}}')
  ((${#commands[@]} == 4))
  make_hang_up
  NO_COLOR=1 run timeout 300 "$CLUSTER" run login "$PYTHON" hang_up.py "${commands[0]/ 8 / 2 } ${LONG[*]}" </dev/null
  echo "$output"
  [[ $output == *"2 nodes x 2, gloo"*"stop       $LAUNCH --stop mine"$'\n'"the end of 0"* ]]
  eventually grep -q '^\[0\] step 1/' logs/mine/launcher_login.log
  run -124 on login timeout 1 bash -c "${commands[1]}"
  [[ $output == *"[0] step "* ]]
  run on login bash -c "${commands[2]}"
  [[ $status == 0 && $output == "mine  running  since "*"  loss "* ]]
  run on node1 bash -c "${commands[3]}"
  [[ $status == 3 && $output == *"run mine is running on login, as of "*"; stop it on login" ]]
  run on login bash -c "${commands[3]}"
  [[ $status == 0 && $output == *$'\n'"mine  ended, code 75 "* ]]
  is_gone mine
  [[ -d checkpoints/mine/latest/. ]]
  grep -q '^resume   RUN_ID=mine .*--detach' logs/mine/launcher_login.log

  make_idle
  export TRAIN_SCRIPT=idle.py LAUNCH=scripts/ssh/launch_pdsh_multinode.sh
  local end
  for end in fails killed; do
    RUN_ID=$end launch --detach - 1 node1 node2 -- busy "$end"
    eventually grep -q '^\[0\] met' "logs/$end/launcher_login.log"
  done
  on node2 kill -KILL "$(find_victim fails node2 rank)"
  on login kill -KILL "$(launcher_pid killed)"
  eventually is_gone fails
  eventually is_gone killed
  eventually detached_as fails "ended, code 137"
  eventually detached_as killed "(killed|ended, code 1(37|43))"
  grep -q '^FAILED   rank 1 (local rank 0, node2)' logs/fails/launcher_login.log
  eventually is_empty tmp
  run ! on login pgrep -f "/start.py launch_pdsh_|exec bash -s"
}

detached_as() { # <run id> <state>
  [[ $(on login "$LAUNCH" --status "$1") =~ ^$1\ \ $2\ \  ]]
}

is_empty() { # <folder>; torch keeps a cache in that for temporary files
  [[ -z $(ls -A -I 'torchinductor_*' -- "$1") ]]
}

@test "arguments and variables arrive byte for byte, and no secret shows in ps" {
  make_dump
  cat >>dump.py <<'PY'
    import subprocess
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    given = [os.environ.get(name) for name in ("WANDB_API_KEY", "MINE", "TOOLKIT", "OTHER")]
    with open("seen.json", "w") as file:
        json.dump([given, "hush" in shown], file)
PY
  make_config "$ODD_CONFIG"
  export WANDB_API_KEY=$'hush "$x"\n`y`' MINE="hush 'z'" OTHER=hush FORWARD_ENV=MINE MODULES=tools
  module() { export TOOLKIT=hush; }
  export -f module
  "$CLUSTER" run login bash -c 'while sleep 0.05; do ps -eo args; done' >ps.out 3>&- &
  local watch=$!
  launch "$ODD_CONFIG" 1 node1 node2 "${ODD_SETTINGS[@]}" -- "${ODD_REST[@]}"
  assert_odd_dumped
  rm dump.json
  SKIP_PREFLIGHT=1 LAUNCH=scripts/ssh/launch_pdsh_multinode.sh launch "$ODD_CONFIG" 1 node1 node2 "${ODD_SETTINGS[@]}" -- "${ODD_REST[@]}"
  kill "$watch"
  assert_odd_dumped
  "$PYTHON" -c 'import json, sys; assert json.load(open("seen.json")) == [[*sys.argv[1:], "hush", None], False]' "$WANDB_API_KEY" "$MINE"
  grep -q "ssh .* node2 exec bash -s" ps.out
  run ! grep -q hush ps.out
  run ! grep -qE '[0-9a-f]{64}' ps.out # the run's own secret
}

@test "the preflight: every fault of every node in one list, and nothing is started" {
  "$CLUSTER" run node1 "$PYTHON" -c 'import socket, time; s = socket.create_server(("", 4321)); time.sleep(600)' 3>&- &
  local holder=$!
  eventually on node1 bash -c '</dev/tcp/127.0.0.1/4321'
  "$CLUSTER" cut node3
  make_config my.yaml
  mkdir home
  echo "sleep 60" >home/.bashrc
  on node4 mount --bind home "$CLUSTER_DIR/home"
  MASTER_PORT=4321 run launch my.yaml 1 node1 node2 node3 nobody@node2 no-such-host node4 train.batch_size=1
  on node4 umount --lazy "$CLUSTER_DIR/home"
  "$CLUSTER" restore node3
  kill "$holder"
  echo "$output"
  ((status == 3 && ${#lines[@]} == 5))
  [[ ${lines[0]} == "launch_torchrun_auto.sh: node3: ssh: connect to host node3"*" [host-unreachable]" ]]
  [[ ${lines[1]} == "launch_torchrun_auto.sh: nobody@node2: nobody@node2: Permission denied "*" [ssh-refused]" ]]
  [[ ${lines[2]} == "launch_torchrun_auto.sh: no-such-host: ssh: Could not resolve "*" [name-unresolved]" ]]
  [[ ${lines[3]} == "launch_torchrun_auto.sh: node4: no answer within 17 s; check that the machine is up and that ssh logs in without a prompt, or raise PREFLIGHT_SECONDS [host-unreachable]" ]]
  [[ ${lines[4]} == "launch_torchrun_auto.sh: node1: port 4321 is taken by "*" [port-in-use]" ]]
  [[ ! -e logs ]]
  echo "exit 0" >home/.bashrc
  on node4 mount --bind home "$CLUSTER_DIR/home"
  run launch my.yaml 1 node1 node4 train.batch_size=1
  on node4 umount --lazy "$CLUSTER_DIR/home"
  [[ $status == 3 && $output == "launch_torchrun_auto.sh: node4: ssh to node4 ended without a message; make sure that 'ssh node4 true' works without a prompt [ssh-refused]" ]]
  run on login env SSH_OPTS="-o NoSuchOption=1" "$LAUNCH" my.yaml 1 node1 train.batch_size=1
  [[ $status == 3 && $output == *"node1: "*"Bad configuration option: nosuchoption"*"[ssh-refused]" ]]
  SSH_OPTS="-F $CLUSTER_DIR/etc/ssh_config -o UserKnownHostsFile=/dev/null" run on login env \
    SSH_OPTS="-F $CLUSTER_DIR/etc/ssh_config -o UserKnownHostsFile=/dev/null" "$LAUNCH" my.yaml 1 node1
  [[ $status == 3 && $output == *"Host key verification failed"*"[ssh-refused]" ]]
}

# bats test_tags=slow
@test "nodes where only torch is installed: the preflight, a restart, an error, the self-test" {
  cat >raises.py <<'PY'
import time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 3:
    raise ValueError("boom")
time.sleep(600)
PY
  export MAX_RESTARTS=1 RUN_ID=alone TRAIN_SCRIPT=raises.py
  PYTHON=$("$PYTHON" "$ROOT/tests/unit/torch_alone.py" "$PWD/alone")
  for LAUNCH in scripts/ssh/launch_{torchrun_auto,pdsh_multinode}.sh; do
    run launch - 2 node1 node2
    echo "$output"
    ((status == 1))
    [[ $output == *"preflight  29 checks on 2 nodes: ok"* && $output != *NumPy* ]]
    [[ $output == *"node agent: restart 1 of 1 after rank 3 (local rank 1, node2): ValueError: boom; "* ]]
    [[ $output == *$'\nFAILED   rank 3 (local rank 1, node2) '*$' [rank-error]\ncause    ValueError: boom\n         raises.py:6 in <module>\ncode     1\n'* ]]
  done
  unset MAX_RESTARTS RUN_ID TRAIN_SCRIPT
  LAUNCH=scripts/test_distributed.sh run launch 2 node1 node2 --quick
  echo "$output"
  # On a busy machine, a link may be slow.
  [[ $output =~ $'\n[0] links     '.*$'\n[0] '(PASS|FAIL)'  4 ranks on 2 nodes, gloo: ' && $output != *NumPy* ]]
}

@test "a node that cannot import torch is the only one named, over ssh and under SLURM" {
  local torch script
  torch=$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
  mkdir -p broken/torch
  ln -s "$torch"/{version.py,_C.*} broken/torch
  echo "import not_there" >broken/torch/__init__.py
  # shellcheck disable=SC2016 # expanded on each node
  printf '#!/bin/sh\n[ "$(hostname)" = node2 ] && export PYTHONPATH=%q\nexec %q "$@"\n' "$PWD/broken" "$PYTHON" >python
  chmod +x python
  make_idle
  export PYTHON=$PWD/python TRAIN_SCRIPT=idle.py
  run launch - 1 node1 node2 -- idle
  [[ $status == 3 && $output == *"node2: "*" cannot import torch: there is no libtorch_python.so; "*"[env-missing]" ]]
  ln -s "$torch/lib" broken/torch # now only an import shows the fault
  run launch - 1 node1 node2 -- idle
  echo "$output"
  ((status == 1))
  [[ $output == *"preflight  29 checks on 2 nodes: ok"*$'\nFAILED   node agent 1 (node2) '*"[env-missing]"$'\ncause    the node agent could not import torch: ModuleNotFoundError: '* ]]
  run on login salloc --quiet --nodes=2 --nodelist=node1,node2 --ntasks-per-node=1 scripts/run_ddp.sh -n 1 -- idle
  echo "$output"
  ((status == 1))
  [[ $output == *$'\nFAILED   node agent 1 (node2) '*"[env-missing]"$'\ncause    the node agent could not import torch: ModuleNotFoundError: '* ]]
}

STARTED="agent.py|far_side" # by srun or ssh: these match a node agent's supervisor, and its fork

has_agent() { # <output of the launcher>
  grep -q '^logs ' "$1" && (($(on node2 pgrep -c -f "$STARTED") == 2))
}

@test "a node agent killed before it has checked in is named, over ssh and under SLURM" {
  make_idle
  mkdir slow
  cat >slow/sitecustomize.py <<'END' # the other nodes wait for node1
import builtins, os, time
at_once = builtins.__import__
def slowly(name, *rest, **more):
    if name.startswith("torch") and os.uname().nodename == "node1":
        builtins.__import__ = at_once
        time.sleep(8)
    return at_once(name, *rest, **more)
builtins.__import__ = slowly
END
  printf '#!/bin/sh\nPYTHONPATH=%q exec %q "$@"\n' "$PWD/slow" "$PYTHON" >python
  chmod +x python
  export PYTHON=$PWD/python TRAIN_SCRIPT=idle.py
  local start name
  for start in "$LAUNCH - 1 node1 node2 node3" \
    "salloc --quiet --nodes=3 --nodelist=node[1-3] --ntasks-per-node=1 scripts/run_ddp.sh -n 1"; do
    name=${start%% *}
    name=${name##*/}
    # shellcheck disable=SC2086 # split into words
    timeout 300 "$CLUSTER" run login $start -- idle >"$name.out" 2>&1 3>&- &
    PID=$!
    eventually has_agent "$name.out"
    sleep 2 # it imports torch, or waits for node1
    on node2 kill -KILL "$(on node2 pgrep -n -f "$STARTED")"
    end_of "$PID"
    cat "$name.out"
    ((CODE == 137))
    [[ $(grep -c '^FAILED ' "$name.out") == 1 ]]
    grep -q '^FAILED   node agent 1 (node2) .*\[agent-killed\]$' "$name.out"
    grep -qE '^cause    SIGKILL to the node agent, (from outside this run|while it imported torch)$' "$name.out"
    eventually run ! on node1 pgrep -f "$STARTED"
  done
}

@test "a project behind a link: the nodes use the path that was typed, not the link's target" {
  mkdir -p export/own
  cp -r -- "$ROOT"/{scripts,launcher,distributed} export/
  ln -s export home
  cat >export/own/probe.py <<'PY'
import os
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("in", os.getcwd(), flush=True)
PY
  # shellcheck disable=SC2016 # expanded on node2
  on node2 bash -ec 'mkdir /dev/shm/export; mount --bind "$1/export" /dev/shm/export; mount -t tmpfs none "$1"
    mkdir "$1/home"; mount --bind /dev/shm/export "$1/home"' bash "$PWD"
  cd home/own
  LAUNCH=../scripts/ssh/launch_torchrun_auto.sh SHOW_RANKS=all TRAIN_SCRIPT=probe.py run launch - 1 node1 node2
  echo "$output"
  [[ $status == 0 && $output == *"[1] [rank1] in $PWD"* ]]
  on node2 umount --lazy "$BATS_TEST_TMPDIR/home" "$BATS_TEST_TMPDIR" /dev/shm/export
}

# bats test_tags=prove,long
@test "through pdsh a run survives 5 s without network; a longer cut ends it and is named" {
  make_idle
  export TRAIN_SCRIPT=idle.py LAUNCH=scripts/ssh/launch_pdsh_multinode.sh SILENCE_SECONDS=10
  start cut - 1 node1 node2 -- idle
  "$CLUSTER" cut node2
  sleep 5 # the time without a network
  "$CLUSTER" restore node2
  sleep 10 # SILENCE_SECONDS: by then, a run that had lost a node would have ended
  run ! grep -q FAILED cut.out
  end_by_a_cut cut "$PID"
}

# Prints the processes of run $1 on a host, and those that they start.
processes_of() { # <run id> <host>
  on "$2" pgrep -f "rdzv-id $1 "
}

# bats test_tags=prove,long
@test "a cut of 25 s, a node that stands still for 15 s and a suspended launcher do not end a run" {
  local there pid
  make_idle
  export TRAIN_SCRIPT=idle.py
  start pauses - 1 node1 node2 -- busy pauses
  "$CLUSTER" cut node2
  sleep 25 # the time without a network
  "$CLUSTER" restore node2
  eventually grep -q '^launch_torchrun_auto.sh: node2: heartbeats again, after' pauses.out
  grep -q '^launch_torchrun_auto.sh: node2: warning: no heartbeat for 1[0-2] s; after 60 s, ' pauses.out
  mapfile -t there < <(processes_of pauses node2)
  on node2 kill -STOP "${there[@]}"
  sleep 15 # a virtual machine that is moved
  on node2 kill -CONT "${there[@]}"
  on login kill -STOP "$(launcher_of pauses)"
  sleep 23 # a job that is suspended
  pid=$PID
  # nsenter stops when its child does.
  while pid=$(pgrep -o -P "$pid"); do kill -CONT "$pid"; done
  sleep 10 # a launcher or node that had given up would have ended the run
  kill -0 "$PID"
  on login kill -TERM "$(launcher_of pauses)"
  end_of "$PID"
  cat pauses.out
  ((CODE == 143))
  run ! grep -q -e FAILED -e '\[link-lost\]' pauses.out
}

# bats test_tags=prove,long
@test "a stopped ssh does no harm; a stopped far side of node rank 0 is named although rank 0 prints" {
  local began
  cat >prints.py <<'PY'
import time
import torch.distributed as dist
dist.init_process_group("gloo")
while True:
    print("met", flush=True)
    time.sleep(0.1)
PY
  export TRAIN_SCRIPT=prints.py SILENCE_SECONDS=10
  start stopped - 1 node1 node2 -- stopped
  on login pkill -STOP -f "ssh .* node2 exec bash"
  sleep 15 # a node that is not heard for 10 s would be lost
  run ! grep -q 'no heartbeat' stopped.out
  on login pkill -STOP -f "ssh .* node2 exec bash"
  began=$SECONDS
  on login kill -TERM "$(launcher_of stopped)"
  end_of "$PID"
  ((CODE == 143 && SECONDS - began < 15))
  run ! on login pgrep -f "ssh .* exec bash"
  start far - 1 node1 node2 -- far
  on node1 kill -STOP "$(on node1 pgrep -o -f "far_side --rdzv-id far ")"
  end_of "$PID"
  grep -v ' met$' far.out
  ((CODE == 137))
  grep -q '^launch_torchrun_auto.sh: node1: warning: no heartbeat for ' far.out
  grep -q '^FAILED   node agent 0 (node1) .*\[link-lost\]$' far.out
  eventually is_gone far
}

# bats test_tags=prove,long
@test "a node whose log's file system answers nothing for 20 s is not lost" {
  truncate --size 64M disk.img
  mkfs.ext4 -q -F disk.img
  mkdir logs
  on node1 mount --options loop disk.img "$PWD/logs"
  SILENCE_SECONDS=10 start frozen config/local3.yaml 1 node1 node2 "${LONG[@]}"
  on node1 fsfreeze --freeze "$PWD/logs"
  sleep 20 # twice SILENCE_SECONDS
  on node1 fsfreeze --unfreeze "$PWD/logs"
  on login kill -TERM "$(launcher_of "${LONG[-1]}")"
  end_of "$PID"
  on node1 umount "$PWD/logs"
  cat frozen.out
  ((CODE == 75))
  run ! grep -q -e FAILED -e link-lost frozen.out
}

@test "by hand: a firewall that opens only the master's port, and a path that drops large packets" {
  make_idle
  on node1 iptables --append INPUT --source 10.0.0.2 --protocol tcp --syn ! --dport 29500 --jump DROP
  on node2 iptables --append INPUT --source 10.0.0.1 --match length --length 1401: --jump DROP
  export TRAIN_SCRIPT=idle.py LAUNCH=scripts/ssh/launch_torchrun_multinode.sh
  timeout 300 "$CLUSTER" run node2 "$LAUNCH" - 1 2 1 node1 -- idle >second.out 2>&1 3>&- &
  run timeout 300 "$CLUSTER" run node1 "$LAUNCH" - 1 2 0 node1 -- idle
  end_of $!
  "$CLUSTER" restore node1
  "$CLUSTER" restore node2
  echo "$output"
  cat second.out
  ((status == 3 && CODE == 3))
  [[ ${lines[-1]} == "node agent: node1: cannot reach node2 (10.0.0.2:"*") (it answers, but packets of 1448 bytes are lost), node2: cannot reach node1 (10.0.0.1:"*") (no answer in 3 s); "*" [mtu-too-large]" ]]
  [[ $(tail -n 1 second.out) == "${lines[-1]}" ]]
}

@test "ssh settings for tunnels, and a connection that the user has opened, such as with a second factor" {
  local home=$CLUSTER_DIR/home/.ssh node via
  make_ordinary
  mkdir -p "$home"
  printf '%s\n' 'StdinNull yes' 'ForkAfterAuthentication yes' 'SessionType none' 'RequestTTY force' >"$home/config"
  for via in ssh pdsh; do
    run on login scripts/launch.sh --hosts node1,node2 --via "$via" --nproc-per-node 1 ordinary.py
    echo "$output"
    [[ $status == 0 && $output == *"all 2"* ]]
  done
  printf 'ControlPath %s/%%h\n' "$home" >"$home/config"
  for node in node1 node2; do on login ssh -o ControlMaster=yes -o ControlPersist=yes -fN "$node" 3>&-; done
  echo 'PubkeyAuthentication no' >>"$home/config" # no other connection can be made
  run ! on login ssh -o ControlPath=none node1 true
  for via in ssh pdsh; do
    run on login scripts/launch.sh --hosts node1,node2 --via "$via" --nproc-per-node 1 ordinary.py
    echo "$output"
    [[ $status == 0 && $output == *"all 2"* ]]
  done
  for node in node1 node2; do on login ssh -O exit "$node"; done
  rm "$home/config"
}

@test "by hand: a master behind the address of a service, which forwards one port" {
  local node
  make_ordinary
  for node in node1 node2; do
    on "$node" ip route add 10.79.0.9 dev eth0
    on "$node" iptables -t nat -A OUTPUT -d 10.79.0.9 -p tcp --dport 29500 -j DNAT --to 10.0.0.1:29500
  done
  timeout 300 "$CLUSTER" run node2 scripts/launch.sh --nnodes 2 --node-rank 1 --master-addr 10.79.0.9 ordinary.py >second.out 2>&1 3>&- &
  run timeout 300 "$CLUSTER" run node1 scripts/launch.sh --nnodes 2 --node-rank 0 --master-addr 10.79.0.9 ordinary.py
  end_of $!
  for node in node1 node2; do
    on "$node" iptables -t nat -F OUTPUT
    on "$node" ip route del 10.79.0.9
  done
  echo "$output"
  cat second.out
  [[ $status == 0 && $CODE == 0 && $output == *"all 2"* ]]
}

# bats test_tags=prove,long
@test "by hand: a master that is down is host-unreachable" {
  "$CLUSTER" cut node1
  on node2 ip neigh flush all # otherwise the kernel may believe for 53 s that node1 is up
  LAUNCH=scripts/ssh/launch_torchrun_multinode.sh
  run timeout 300 "$CLUSTER" run node2 "$LAUNCH" config/local3.yaml 1 2 1 node1 distributed.join_timeout=20 "${SHORT[@]}"
  "$CLUSTER" restore node1
  echo "$output"
  ((status == 3))
  [[ ${lines[-1]} == "node agent: node rank 0 at node1:29500 did not answer within 20 s (No route to host); check that the machine is up [host-unreachable]" ]]
}

# bats test_tags=prove,long
@test "only the first node needs a writable checkpoint folder" {
  local node
  mkdir checkpoints
  for node in node2 node1; do
    on "$node" mount --bind checkpoints checkpoints
    on "$node" mount -o remount,ro,bind checkpoints
    run launch config/local3.yaml 1 node1 node2 "${SHORT[@]}" checkpoint.every=3
    on "$node" umount checkpoints
    echo "$output"
    case $node in
      node2) ((status == 0)) ;;
      node1) [[ $status == 3 && $output == *"node1: cannot write under '$PWD/checkpoints' (Read-only file system); "*"[dir-unwritable]" ]] ;;
    esac
  done
}

# bats test_tags=prove,long
@test "aliases, RemoteCommand, start-up files that print without a newline, slow logins" {
  make_idle
  sed -i '/^while/,$d' idle.py
  {
    printf 'Host gpu-%s\n  HostName 10.0.0.%s\n  RemoteCommand tmux\n  RequestTTY yes\n' a 1 b 2
    cat "$CLUSTER_DIR/etc/ssh_config"
  } >config.ssh
  mkdir home
  echo "printf welcome; printf oops >&2; sleep 10" >home/.bashrc
  on node2 mount --bind home "$CLUSTER_DIR/home"
  local setting name
  for setting in PREFLIGHT_SECONDS=30 SKIP_PREFLIGHT=1 PREFLIGHT_SECONDS=9; do
    for name in torchrun_auto pdsh_multinode; do
      [[ $setting == *=30 || $name == torchrun_auto ]] || continue
      run on login env "$setting" TRAIN_SCRIPT=idle.py MASTER_ADDR=gpu-a SSH_OPTS="-F $PWD/config.ssh" \
        "scripts/ssh/launch_$name.sh" - 1 gpu-a gpu-b -- idle
      echo "$setting $name: $status $output"
      if [[ $setting == *=9 ]]; then
        [[ $status == 3 && $output == *"gpu-b: no answer within 6 s; "*" [host-unreachable]" ]]
      else
        [[ $status == 0 && $output == *"gpu-a (master, 10.0.0.1:"*"met"*"code 0; "* ]]
      fi
    done
  done
  on node2 umount --lazy "$CLUSTER_DIR/home"
}

@test "the preflight: what differs between nodes, and a firewall, in the same list" {
  local node line faults own=/dev/shm/own # each host has a separate one
  for node in login node1 node2 node3; do
    on "$node" mkdir -p "$own/torch"
    on "$node" tee "$own/own.py" <<<"print('met')"
    on "$node" tee "$own/my.yaml" <<<"seed: 1"
    on "$node" tee "$own/python" <<<$'#!/bin/sh\nexec "'"$PYTHON"$'" "$@"'
    on "$node" chmod +x "$own/python"
  done
  export PYTHON=$own/python TRAIN_SCRIPT=$own/own.py MASTER_PORT=4322
  launch "$own/my.yaml" 1 node1 node2 node3
  rm -r logs
  on node2 tee "$own/own.py" <<<"print('changed')"
  on node2 rm "$own/my.yaml"
  on node2 touch "$own/torch/__init__.py"
  on node2 tee "$own/torch/version.py" <<<"__version__ = '2.12.1'"
  on node2 sed -i "s|^exec|PYTHONPATH=$own exec|" "$own/python"
  on node3 sed -i 's|"\$@"|-S "$@"|' "$own/python"
  "$CLUSTER" drop node1 4322
  GLOO_SOCKET_IFNAME=ib0 run launch "$own/my.yaml" 1 node1 node2 node3
  "$CLUSTER" restore node1
  ((status == 3 && ${#lines[@]} == 10))
  mapfile -t faults <<<"$output"
  while read -r line; do
    # shellcheck disable=SC2053 # a pattern
    [[ ${faults[0]#launch_torchrun_auto.sh: } == $line ]] || { echo "${faults[0]}, not $line" && false; }
    faults=("${faults[@]:1}")
  done <<'TABLE'
node1: GLOO_SOCKET_IFNAME=ib0: *name eth0, which leads to the master*\[no-such-interface]
node2: */python* cannot import torch: */own/torch' has no _C module for this Python; *\[env-missing]
node2: GLOO_SOCKET_IFNAME=ib0: *name eth0, which leads to the master*\[no-such-interface]
node3: */python* has no torch; *\[env-missing]
node3: GLOO_SOCKET_IFNAME=ib0: *name eth0, which leads to the master*\[no-such-interface]
node2: torch is '*' on node rank 0 (node1) and '2.12.1' on node rank 1 (node2); *\[version-mismatch]
node2: own.py is '*' on node rank 0 (node1) and '*' on node rank 1 (node2); *\[code-mismatch]
node2: my.yaml is '*' on node rank 0 (node1) and 'missing' on node rank 1 (node2); *\[code-mismatch]
node2: cannot reach 10.0.0.1:4322 (no answer in 3 s); *\[port-blocked]
node3: cannot reach 10.0.0.1:4322 (no answer in 3 s); *\[port-blocked]
TABLE
  on node1 iptables --append INPUT --protocol tcp --dport 4322 --jump REJECT
  run launch "$own/my.yaml" 1 node1 node2 node3
  on node1 iptables --flush INPUT
  on node1 iptables --append INPUT --protocol tcp --dport 1024: --jump DROP
  [[ $status == 3 && ${lines[-1]} == *"node3: cannot reach 10.0.0.1:4322 (Connection refused); "*"[port-blocked]" ]]
  on node1 iptables --insert INPUT --protocol tcp --dport 4322 --jump ACCEPT
  run launch "$own/my.yaml" 1 node1 node2 node3
  "$CLUSTER" restore node1
  [[ $status == 3 && ${lines[-1]} == *"node3: cannot reach node1 (10.0.0.1:"*") (no answer in 3 s); open all ports between the nodes"* ]]
  [[ ! -e logs ]]
}
