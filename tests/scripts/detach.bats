#!/usr/bin/env bats
# --detach, --status, --stacks and --stop, on one machine.
# shellcheck disable=SC2030,SC2031 # each test is a subshell, on purpose
bats_require_minimum_version 1.5.0
load ../cluster/helper # for eventually
load helper

launch() {
  "$ROOT/scripts/ssh/launch_singlenode.sh" "$@"
}

# A script that exits with 75 when asked to stop, and with 7 if a file `fail-<run id>` exists.
make_waiting() {
  cat >own.py <<'PY'
import os, signal, sys, time
sys.path.append(os.environ["KIT"])
from distributed.heartbeat import beat
beat(saved=1)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("waiting", *sys.argv[1:], flush=True)
while not os.path.exists("fail-" + os.environ["RUN_ID"]):
    time.sleep(0.1)
sys.exit(7)
PY
  export TRAIN_SCRIPT=own.py KIT=$ROOT
}

# The preflight waits until a file `go` exists.
hold_preflight() {
  fake_tool nvidia-smi "touch '$PWD/held'; until [[ -e '$PWD/go' ]]; do sleep 0.1; done"
}

# No run may outlive its test.
teardown() {
  local record
  for record in logs/*/run.json; do
    if [[ -s $record && ! -L ${record%/*} ]]; then launch --stop "$(basename -- "${record%/*}")" || true; fi
  done
}

state_is() { # <run id> <state>
  [[ $(launch --status "$1") == "$1  $2  "* ]]
}

# The process id of a run's launcher, from run.json.
launcher_of() { # <run id>
  "$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["launcher"]["process"])' "logs/$1/run.json"
}

# Only on this host: processes of a cluster in a box can have the same run id.
is_gone() { # <text in a command line>
  ! pgrep --ns $$ --nslist net -f "$1"
}

# bats test_tags=slow
@test "a detached run outlives its terminal, and answers --status, --stacks, --follow and --stop" {
  make_waiting
  make_hang_up
  NO_COLOR=1 run "$PYTHON" hang_up.py "RUN_ID=mine '$ROOT'/scripts/ssh/launch_singlenode.sh --detach - 1 -- 'a  b'"
  echo "$output"
  [[ $output == *"run        mine"*"preflight  23 checks"*"detached   tail -f logs/mine/launcher_$HOST.log"* ]]
  [[ $output == *"stop       $ROOT/scripts/ssh/launch_singlenode.sh --stop mine
the end of 0"* ]]
  eventually grep -qx "waiting a  b" "logs/mine/launcher_$HOST.log"
  eventually state_is mine running
  run launch --status
  [[ $status == 0 && $output == "mine  running  since 20"*"  own.py 'a  b'  [0] waiting a  b" ]]
  run launch --status mine
  [[ $status == 0 && ${lines[1]} =~ ^"here  rank0 pid "([0-9]+)$ ]]
  [[ $(<"/proc/${BASH_REMATCH[1]}/comm") == rank0 ]]
  RUN_ID=mine run launch - 1 --detach
  [[ $status == 3 && $output == *"run mine is live: process "*"[run-is-live]" ]]
  run launch --stacks mine
  [[ $status == 0 && ${lines[0]} == 20*" where the ranks are, innermost call first:" && ${lines[1]} == *"rank 0: own.py:"*" in <module>" ]]
  run launch --dry-run --stop mine
  [[ $status == 0 && $output == "kill -TERM "* ]]
  run launch --stop mine
  [[ $status == 0 && ${lines[0]} == *"waiting up to 55 s for it to end" && ${lines[1]} == "mine  ended, code 75  "*"[0] waiting a  b" ]]
  eventually is_gone "rdzv-id mine "
  grep -qF "resume   RUN_ID=mine TRAIN_SCRIPT=own.py $ROOT/scripts/ssh/launch_singlenode.sh --detach - 1 -- 'a  b'" "logs/mine/launcher_$HOST.log"
  grep -q '^preflight  23 checks' "logs/mine/launcher_$HOST.log"
  run launch --stop mine
  [[ $status == 3 && $output == *"run mine is not running: ended, code 75; there is nothing to stop" ]]
}

# bats test_tags=slow
@test "--status shows every run: one that failed, and one not detached, alive and killed" {
  local attached
  make_waiting
  RUN_ID=fails launch --detach - 1
  eventually grep -q waiting logs/fails/node_0.log
  touch fail-fails
  eventually state_is fails "ended, code 7"
  RUN_ID=attached launch - 1 3>&- &
  attached=$!
  eventually grep -q waiting logs/attached/node_0.log
  run launch --status
  grep -q '^fails     ended, code 7  ' <<<"$output"
  [[ ${#lines[@]} == 2 && ${lines[0]} == "attached  running  "*" own.py "* ]]
  kill -KILL "$(launcher_of attached)"
  wait "$attached" || [[ $? == 137 ]]
  eventually state_is attached killed
  run -1 "$ROOT/scripts/explain.sh" attached
  [[ ${lines[0]} == "no failure found in 1 file" && ${lines[1]} == "attached  killed  since "* ]]
  eventually is_gone "rdzv-id attached "
}

@test "the printed commands find a folder of logs whose name has a space" {
  echo pass >own.py
  TRAIN_SCRIPT=own.py RUN_ID=mine LOG_DIR="my logs" SKIP_PREFLIGHT=1 run --separate-stderr launch --detach - 1
  # shellcheck disable=SC2154 # bats sets it
  [[ $status == 0 && $stderr == *"status     LOG_DIR='my logs' $ROOT/scripts/"* ]]
  eventually grep -q '"exit_code": 0' "my logs/mine/run.json"
  run bash -c "$(sed -n 's/^status  *//p' <<<"$stderr")"
  [[ $status == 0 && $output == "mine  ended, code 0 "* ]]
}

# bats test_tags=slow
@test "a refusal is printed on the terminal, and leaves nothing behind" {
  run launch --detach
  [[ $status == 2 && $output == "launch_singlenode.sh: no config; usage: "* ]]
  run launch --detach plain.yaml 1 train.max_stepz=3
  [[ $status == 2 && ${#lines[@]} == 1 && $output == *"train.max_stepz: unknown key"* ]]
  fake_gpus 1
  run launch --detach plain.yaml 2
  [[ $status == 3 && ${lines[0]} == *"[too-few-gpus]" ]]
  rm fake/nvidia-smi
  RUN_ID=../up run launch --detach plain.yaml 1
  [[ $status == 2 && $output == *"RUN_ID is '../up'"* && ! -e up ]]
  touch file
  LOG_DIR=file/logs run launch --detach plain.yaml 1
  [[ $status == 3 && ${#lines[@]} == 1 && $output == *"cannot write under"*"[dir-unwritable]" ]]
  RUN_ID=mine LOG_DIR=file/logs SKIP_PREFLIGHT=1 run launch --detach plain.yaml 1
  [[ $status == 3 && ${lines[-1]} == *"cannot write to '$PWD/file/logs/mine' (Not a directory); set LOG_DIR [dir-unwritable]" ]]
  run launch --detach --dry-run plain.yaml 1
  [[ $status == 0 && $output == *"# node 0 "* ]]
  [[ ! -e logs ]]
}

@test "a health check that fails is reported on the terminal" {
  printf '#!/bin/sh\ncase "$*" in *distributed.selftest*) echo broken; exit 1 ;; esac\nexec %s "$@"\n' "$PYTHON" >python
  chmod +x python
  PYTHON=$PWD/python RUN_ID=mine run "$ROOT/scripts/cluster_train.sh" --detach plain.yaml
  [[ $status == 3 && ${lines[-2]} == broken && ${lines[-1]} == *"cannot work together (exit code 1, see above)"* ]]
  [[ ! -e logs/mine ]]
}

# bats test_tags=slow
@test "a launcher that is interrupted before the start starts nothing" {
  local signal launcher
  make_waiting
  hold_preflight
  for signal in INT HUP; do
    rm -f held go
    RUN_ID=$signal env --default-signal=INT "$ROOT/scripts/ssh/launch_singlenode.sh" --detach - 1 -- "$signal" 3>&- &
    launcher=$!
    eventually test -e held
    kill -s "$signal" "$launcher"
    wait "$launcher" || true
    touch go
    eventually is_gone "launch_singlenode.sh --detach - 1 -- $signal"
    [[ ! -e logs/$signal ]]
  done
}

# bats test_tags=slow
@test "a notice that comes while a detached run starts reaches the run" {
  make_waiting
  sed -i 's/^print/signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))\n&/' own.py
  hold_preflight
  RUN_ID=mine "$ROOT/scripts/ssh/launch_singlenode.sh" --detach - 1 3>&- &
  eventually test -e held
  kill -USR1 $!
  touch go
  wait $!
  eventually state_is mine "ended, code 5"
}

# bats test_tags=slow
@test "--stop and --status distinguish runs and hosts, and refuse options that do not fit" {
  mkdir -p logs/here logs/there
  echo '{"state": "running", "launcher": {"process": '$$', "birth": 1, "host": "'"$HOSTNAME"'"}, "started": 1}' >logs/here/run.json
  echo '{"state": "running", "launcher": {"process": 1, "birth": 1, "host": "elsewhere"}, "started": 2}' >logs/there/run.json
  ln -s here logs/latest
  run launch --status
  [[ $status == 0 && ${#lines[@]} == 2 && ${lines[1]} == "here   killed  "* && ${lines[0]} == "there  running on elsewhere, as of 20"* ]]
  run launch --status here
  [[ $status == 0 && $output == "here  killed  since "* ]]
  run launch --stop here
  [[ $status == 3 && $output == "launch_singlenode.sh: run here is not running: killed; "* ]]
  run launch --stacks here
  [[ $status == 3 && $output == "launch_singlenode.sh: run here is not running: killed; it has no stacks" ]]
  run launch --stop there
  [[ $status == 3 && $output == *"; stop it on elsewhere" ]]
  run launch --stop heer
  [[ $status == 2 && $output == *"there is no run 'heer' in logs; did you mean here? "* ]]
  local name
  for name in '' ../logs; do
    run launch --status "$name"
    [[ $status == 2 && $output == *"there is no run '$name' in logs"* ]]
  done
  run launch --stop
  [[ $status == 2 && $output == *"--stop needs one run id"* ]]
  run launch --status --strict
  [[ $status == 2 && $output == *"--strict cannot be used with --status"* ]]
  LOG_DIR=none run launch --status
  [[ $status == 0 && $output == "launch_singlenode.sh: there are no runs in none" ]]
  mkdir empty
  LOG_DIR=empty run launch --status
  [[ $status == 0 && $output == "launch_singlenode.sh: there are no runs in empty" ]]
}

# bats test_tags=slow,long
@test "the log of cluster_train.sh is there, too" {
  make_waiting
  RUN_ID=mine run "$ROOT/scripts/cluster_train.sh" --detach - 1
  [[ $status == 0 ]]
  eventually grep -q '^waiting' logs/distributed_training/latest_node0.log
  grep -q '^preflight ' logs/distributed_training/latest_node0.log
  grep -q '^health ' logs/distributed_training/latest_node0.log
}

@test "by hand only node rank 0 can omit RUN_ID; in a job --detach is refused" {
  local script=$ROOT/scripts/ssh/launch_torchrun_multinode.sh
  run "$script" --detach plain.yaml 1 2 1 127.0.0.1
  assert_refused 2 "set the same RUN_ID on every node"
  # shellcheck disable=SC2016 # must not be expanded
  run "$script" --detach plain.yaml 1 2 'a[$(touch file)]' 127.0.0.1
  [[ $status == 2 && ! -e file ]]
  SLURM_JOB_ID=1 run launch --detach plain.yaml
  assert_refused 2 "use sbatch, squeue and scancel (PBS: qsub, qstat and qdel)"
  PBS_JOBID=1 run launch --stop 1
  assert_refused 2 "qdel"
  local name
  for name in submit_with_config slurm/slurm_train slurm/slurm_train_single_node pbs/pbs_train; do
    run "$ROOT/scripts/$name.sh" --detach
    assert_refused 2 squeue
  done
}
