#!/usr/bin/env bats
# shellcheck disable=SC2030,SC2031,SC2153 # each test is a subshell, on purpose
bats_require_minimum_version 1.5.0
load helper

launch() {
  "$ROOT/scripts/launch.sh" "$@"
}

# The agent's arguments, from the dry run of a launch.
planned() { # <argument...>
  launch --dry-run "$@" | sed -n 's|^cd .*/scripts/lib/agent.py ||p'
}

# A script like nanoGPT: globals as settings, a config file that is executed, and --name=value.
make_nano() {
  mkdir config
  echo 'batch_size = 8; learning_rate = 1e-3' >config/x.py
  cat >configurator.py <<'PY'
import sys
from ast import literal_eval
for arg in sys.argv[1:]:
    if "=" not in arg:
        exec(open(arg).read())
    else:
        key, value = arg.removeprefix("--").split("=")
        globals()[key] = literal_eval(value)
PY
  cat >train.py <<'PY'
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
batch_size = 12
learning_rate = 6e-4
exec(open("configurator.py").read())
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(batch_size, 4)).sum().backward()
print(os.environ["RANK"], dist.get_world_size(), batch_size, learning_rate, flush=True)
dist.destroy_process_group()
PY
}

@test "what is no Python program is refused before anything starts" {
  echo "train: {lr: 1}" >my.yaml
  run launch my.yaml
  assert_refused 2 "'my.yaml' is not a Python program; put the script before it, or --no-python if it is a program" config-invalid
  printf 'import os\ndef f(:\n  pass\n' >bad.py
  run launch --nproc-per-node 2 bad.py
  assert_refused 2 "bad.py:2: invalid syntax: def f(:; correct it" rank-error
  [[ ! -e logs ]]
}

@test "the script's -h runs it once, and starts no rank" {
  printf '%s\n' 'import argparse, os' 'print("world", os.environ["WORLD_SIZE"])' \
    'parser = argparse.ArgumentParser(); parser.add_argument("--lr"); parser.parse_args()' >own.py
  local word
  for word in -h --help; do
    run --separate-stderr launch --nproc-per-node 4 --hosts nowhere1,nowhere2 own.py --lr 1 "$word"
    [[ $status == 0 && $(grep -c '^usage: own.py' <<<"$output") == 1 && ${lines[0]} == "world 1" ]]
    # shellcheck disable=SC2154 # bats sets it
    [[ $stderr == "launch.sh: shows the help of own.py --lr 1; no rank is started" ]]
  done
  run launch "$ROOT/train.py" -h
  [[ $status == 0 && $output == *"usage: train.py"* ]]
  [[ ! -e logs ]]
}

@test "--help: usage, an example, the environment" {
  run launch --help
  [[ $status == 0 && $output == *"usage: scripts/launch.sh [TORCHRUN OPTIONS] [--hosts LIST|FILE|job] SCRIPT"* ]]
  [[ $output == *"--nproc-per-node 4 train.py"* && $output == *--show* && $output == *LOG_DIR* ]]
}

@test "a project, a kit and a Python behind links are named as they were typed" {
  mkdir -p export/own
  ln -s export home
  ln -s "$ROOT" kit
  ln -s "${PYTHON%/*}" export/bin
  touch export/own/x.py
  local up=$PWD typed
  for typed in home export; do # export is no link, so its typed path is its real path
    cd "$up/$typed/own"
    PYTHON=$up/export/bin/python run ../../kit/scripts/launch.sh --dry-run x.py
    [[ $status == 0 && $output == *"cd $up/$typed/own && env "*" $up/$typed/bin/python $up/kit/scripts/lib/agent.py "* ]]
  done
}

@test "--dry-run on a machine without GPUs shows the plan for one rank per GPU" {
  CUDA_VISIBLE_DEVICES='' run launch --dry-run --nproc-per-node gpu own.py
  [[ $status == 0 && $output == *"there is no visible GPU; give the number of processes [too-few-gpus]"* ]]
  [[ $output == *"--nproc-per-node 1 "* ]]
}

@test "--dry-run: the plan and the golden command" {
  export RUN_ID=golden
  run --separate-stderr launch --dry-run --nproc-per-node 2 --master-port 23456 own.py --dry-run a=b -- 'c d'
  [[ $status == 0 ]]
  assert_output "# node 0 ($HOST): ranks 0-1 of 2, rendezvous 127.0.0.1:23456
$(golden_command "$ROOT/scripts/launch.sh --nproc-per-node 2 --master-port 23456 own.py --dry-run a=b -- '\"'\"'c d'\"'\"'" \
    1 0 2 127.0.0.1 "own.py --dry-run a=b -- 'c d'" | sed "s/'\"'\"'\"'\"'\"'\"'\"'\"'/'\"'\"'/g")"
  # shellcheck disable=SC2154 # set by run
  [[ $stderr == *"logs       logs/golden/ "* && ! -e logs ]]
}

# bats test_tags=slow
@test "nanoGPT's command line, in place of torchrun's and through TRAIN_SCRIPT" {
  make_nano
  run --separate-stderr launch --nproc-per-node 2 train.py config/x.py --batch_size=32
  [[ $status == 0 && $output == "0 2 32 0.001" ]]
  TRAIN_SCRIPT=train.py run --separate-stderr "$ROOT/scripts/ssh/launch_singlenode.sh" - 2 --dry-run -- config/x.py --batch_size=32
  [[ $status == 0 && $output == *" train.py config/x.py --batch_size=32" ]]
}

# bats test_tags=slow,long
@test "--show all: every rank's output, each line after its rank" {
  make_nano
  run --separate-stderr launch --nproc-per-node 2 --show all train.py
  [[ $status == 0 && $(sort <<<"$output") == $'[rank0] 0 2 12 0.0006\n[rank1] 1 2 12 0.0006' ]]
  run launch --show 7 train.py
  assert_output "launch.sh: SHOW_RANKS is '7'; choose from all, 0 [config-invalid]"
}

# bats test_tags=slow
@test "a module, any program, a folder with __main__.py; its exit code" {
  make_module
  unset TRAIN_SCRIPT
  # shellcheck disable=SC2016 # must not be expanded
  run --separate-stderr launch -m pkg.mod -m x --log '$$5' '${local_rank}' --n --node-rank -1
  # shellcheck disable=SC2016
  [[ $status == 0 && $output == 'pkg.mod 1 of 1: -m x --log $$5 ${local_rank} --n --node-rank -1' ]]
  # shellcheck disable=SC2016 # expanded by the program
  run --separate-stderr launch --nproc_per_node=2 --no-python bash -c 'echo "$RANK: $1"; exit $((RANK ? 0 : 7))' bash 'a  b'
  [[ $status == 7 && $output == "0: a  b" && $stderr == *"FAILED   rank 0 "* ]]
  cp pkg/mod.py pkg/__main__.py
  run --separate-stderr launch pkg x
  [[ $status == 0 && $output == "pkg.mod 1 of 1: x" ]]
}

# bats test_tags=slow,long
@test "two nodes by hand train together" {
  make_nano
  local port words=(--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1)
  port=$("$PYTHON" -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')
  launch "${words[@]}" --node-rank 1 --master-port "$port" train.py >node1.out 2>&1 3>&- &
  run --separate-stderr launch "${words[@]}" --node_rank=0 --master_port="$port" train.py
  wait $!
  [[ $status == 0 && $output == "0 2 12 0.0006" ]]
  grep -q '^\[1\] 1 2 12' logs/node_1.log
}

# bats test_tags=slow
@test "torchrun's options: those for the plan, those for the agent, and PET_ variables" {
  export RUN_ID=r
  [[ $(planned own.py) == *" --nproc-per-node 1 "*" --rdzv-id r own.py" ]]
  [[ $(planned --nproc-per-node=cpu own.py) == *" --nproc-per-node $(getconf _NPROCESSORS_ONLN) "* ]]
  [[ $(planned --nproc-per-node auto own.py) == *" --nproc-per-node $(getconf _NPROCESSORS_ONLN) "* ]]
  [[ $(NPROC_PER_NODE=3 planned own.py) == *" --nproc-per-node 3 "* ]]
  [[ $(PET_NPROC_PER_NODE=3 PET_LOG_DIR=there planned own.py) == *" --nproc-per-node 3 "*" --log-dir there "* ]]
  [[ $(PET_NO_PYTHON=1 PET_MODULE=0 planned "$(type -P true)") == *" --no-python "*/true ]]
  [[ $(RUN_ID='' planned --rdzv_id='7/a b:c' --log-dir=x --max-restarts 2 --role w -t 3 own.py) == *" --log-dir x --rdzv-id 7_a_b_c --max-restarts 2 --role w -t 3 own.py" ]]
  [[ $(planned --nnode=1 --redirect=0 -t3 --nproc_per=2 own.py) == *" --nproc-per-node 2 "*" --redirects 0 -t 3 own.py" ]]
  [[ $(planned --rdzv-endpoint=localhost:0 --master-port=0 --rdzv-id=none own.py) == "--nnodes 1 "*" --master-port "[1-9]* ]]
  [[ $(planned --master-addr other own.py) == "--nnodes 1 --node-rank 0 --master-addr 127.0.0.1 "* ]]
  [[ $(launch --dry-run --master-addr other own.py 2>&1) == *"warning: one node needs no master: other is ignored"* ]]
  [[ $(planned --standalone --rdzv-backend c10d own.py) == "--nnodes 1 --node-rank 0 --master-addr 127.0.0.1 "* ]]
  [[ $(planned --nnodes 2:2 --node-rank 1 --rdzv-backend c10d --rdzv-endpoint localhost:4000 own.py) == "--nnodes 2 --node-rank 1 --master-addr localhost --nproc-per-node 1 --master-port 4000 "* ]]
  local same=(--nnodes=2 --rdzv-backend=c10d --rdzv-id=7 own.py)
  [[ $(planned --rdzv-endpoint=127.0.0.1:4000 "${same[@]}") == "--nnodes 2 --node-rank 0 --master-addr 127.0.0.1 "*" --master-port 4000 "* ]]
  [[ $(RUN_ID='' planned --rdzv-endpoint=no-such-host:4000 "${same[@]}") == "--nnodes 2 --node-rank -1 --master-addr no-such-host "*"--log-dir logs own.py" ]]
  fake_gpus 3
  [[ $(planned --nproc-per-node gpu own.py) == *" --nproc-per-node 3 "* ]]
}

@test "bad arguments: one line" {
  echo pass >own.py
  run launch --nproc-per-node 2
  assert_refused 2 "no SCRIPT; usage: scripts/launch.sh"
  run launch --nproc-per-node
  assert_refused 2 "option --nproc-per-node needs a value"
  run launch --show
  assert_refused 2 "option --show needs a value"
  run launch --fast own.py
  assert_refused 2 "unknown option '--fast'; see launch.sh --help, and put the training script's own options after its name"
  run launch --no own.py
  assert_refused 2 "unknown option '--no'"
  run launch --nnodes 1:4 own.py
  assert_refused 2 "--nnodes 1:4: a range needs --rdzv-backend c10d; add it, or give one number"
  run launch --nnodes 2 --rdzv-backend etcd-v2 own.py
  assert_refused 2 "--rdzv-backend etcd-v2: not supported"
  run launch --nnodes 2 own.py
  assert_refused 2 "2 nodes, but no MASTER_ADDR"
  run launch own.pyy
  assert_refused 3 "own.pyy'; correct its path; for a module, give -m and its name" env-missing
  run launch .
  assert_refused 3 "'$PWD' is a folder without __main__.py; correct its path" env-missing
  run launch ""
  assert_refused 2 "SCRIPT is empty; usage: scripts/launch.sh"
  local words
  for words in --help --version; do
    run bash -c '"$0" "$1" >/dev/full' "$ROOT/scripts/launch.sh" "$words"
    assert_refused 1 "launch.sh: cannot write the output; free some disk space" disk-full
  done
  run bash -c '"$0" --help 2>err | head -c 1; cat err' "$ROOT/scripts/launch.sh"
  [[ $output == R ]] # a reader that exits early is not a full disk
  PYTHONHOME=/nowhere run launch own.py
  assert_refused 3 "PYTHONHOME=/nowhere does not match " env-missing
  mkdir gone && cd gone && rmdir "$OLDPWD/gone"
  run launch "$OLDPWD/own.py"
  # Before it reads a script, bash itself prints one line.
  [[ $status == 2 && ${#lines[@]} == 2 && ${lines[0]} == "shell-init: "* ]]
  [[ ${lines[1]} == "launch.sh: the working directory has been removed; cd to one that exists [dir-unwritable]" ]]
  cd "$BATS_TEST_TMPDIR"
  run launch --nproc-per-node gpu own.py
  assert_refused 3 "there is no visible GPU; give a number of processes" too-few-gpus
}

# bats test_tags=slow
@test "a rank can launch: an evaluation is a run of its own" {
  echo 'import os; print("inner", os.environ["RUN_ID"], os.environ["WORLD_SIZE"], flush=True)' >inner.py
  echo "import subprocess, sys; sys.exit(subprocess.call(['$ROOT/scripts/launch.sh', 'inner.py']))" >outer.py
  RUN_ID=outer run --separate-stderr launch outer.py
  [[ $status == 0 && $output =~ ^"inner "[0-9]+-[0-9]+-[0-9a-f]+" 1"$ && -f logs/outer/run.json ]]
}

# --- in a user's repository ---

# The kit's folders, copied into a repository with its own train.py and files named like modules.
make_repository() {
  cp -r "$ROOT"/{scripts,launcher,distributed} .
  echo 'open("was_run", "a").write("train.py"); print("mine", __import__("sys").argv[1:], flush=True)' >train.py
  local name
  for name in json types dataclasses selectors torch yaml; do
    echo "open('$PWD/was_run', 'a').write('$name'); raise SystemExit('$name is mine')" >$name.py
  done
}

# bats test_tags=slow
@test "a plan runs none of the user's files" {
  make_repository
  TRAIN_SCRIPT=other.py run --separate-stderr scripts/ssh/launch_singlenode.sh - 2 --dry-run
  [[ $status == 0 && $output == *" other.py" ]]
  run --separate-stderr scripts/ssh/launch_singlenode.sh plain.yaml 2 --dry-run
  [[ $status == 0 && $output == *" $PWD/train.py --config plain.yaml" ]]
  run --separate-stderr scripts/run_ddp.sh -n 2 --dry-run
  [[ $status == 0 && $output == *" $PWD/train.py" ]]
  run --separate-stderr scripts/launch.sh --dry-run train.py
  [[ $status == 0 && $output == *" train.py" ]]
  mkdir training
  echo 'from training.arguments import read_command_line, refuse, refuse_together' >>train.py
  echo 'from distributed.errors import Refused' >training/arguments.py
  run --separate-stderr scripts/run_ddp.sh -n 2 --dry-run
  [[ $status == 0 && ! -e was_run ]]
}

# bats test_tags=slow
@test "a user's own train.py runs only as the ranks' program" {
  make_repository
  rm torch.py types.py dataclasses.py selectors.py json.py # torchrun's ranks would import these
  run --separate-stderr scripts/launch.sh train.py a
  [[ $status == 0 && $output == "mine ['a']" && $(<was_run) == train.py ]]
}

# bats test_tags=slow,long
@test "logs go to LOG_DIR, and the user's own files in it stay" {
  echo pass >own.py
  mkdir mine
  echo notes | tee mine/node_0.log >mine/latest
  LOG_DIR=mine RUN_ID=r run launch own.py
  [[ $status == 0 && $output == *"logs       mine/r/ "* && -f mine/r/node_0.log && ! -e logs ]]
  [[ $(cat mine/node_0.log mine/latest) == $'notes\nnotes' && ! -L mine/node_0.log && ! -L mine/latest ]]
}

# bats test_tags=slow
@test "a link to a folder that was purged: the folder is made again" {
  echo pass >own.py
  ln -s "$PWD/purged/logs" logs
  RUN_ID=r run launch own.py
  [[ $status == 0 && -f purged/logs/r/node_0.log ]]
  rm -r purged
  RUN_ID=r SKIP_PREFLIGHT=1 run launch own.py
  [[ $status == 0 && -f purged/logs/r/node_0.log ]]
}

@test "a missing part of the kit: one line" {
  cp -r "$ROOT"/{scripts,distributed} .
  echo pass >own.py
  run scripts/launch.sh own.py
  assert_refused 2 "there is no launcher/start.py in $PWD; keep scripts/, launcher/ and distributed/ of this project together"
}

@test "values that other programs put into our variables: a warning each, and the run starts" {
  touch x.py
  export BACKEND=hf LAUNCHER=local LOG_LEVEL=info SITE=nersc VENV=mine MODULES=tools FRESH=true
  export LAUNCH_PYTHON=$PYTHON # set by the command that pip installs
  PYTHON=3.11 run --separate-stderr launch --dry-run x.py
  [[ $status == 0 && $stderr != *LOG_LEVEL* ]]
  local name
  for name in BACKEND LAUNCHER SITE VENV MODULES PYTHON FRESH; do
    [[ $(grep -c "^launch.sh: warning: $name is .*; ignored$" <<<"$stderr") == 1 ]]
  done
  [[ $output == *"'LAUNCH_COMMAND=LOG_LEVEL=INFO $ROOT/scripts/launch.sh x.py'"* ]] # what resumes the run
  unset MODULES VENV
  MODULES=none SITE='' run --separate-stderr launch --dry-run x.py
  [[ $status == 0 && $stderr != *MODULES* ]]
  unset BACKEND LAUNCHER LOG_LEVEL SITE FRESH
  export MASTER_PORT=tcp://10.96.0.7:80 CONTAINER=docker MIN_NODES=1 SPARES=one RUN_ID=team/exp:1 GRACE=forever MAX_RESTARTS=always
  export NUMA_BINDING=1 SHOW_RANKS=true SKIP_PREFLIGHT=true HANG_SECONDS=never NPROC_PER_NODE=many HOSTS=/etc/hosts NCCL_PROFILE=perf CONDA_ENV=mine
  CONDA_EXE=no-conda run --separate-stderr launch --dry-run x.py
  [[ $status == 0 && $stderr == *"ranks      1 = 1 node x 1, gloo"* ]]
  for name in MASTER_PORT CONTAINER MIN_NODES SPARES RUN_ID GRACE MAX_RESTARTS NUMA_BINDING SHOW_RANKS SKIP_PREFLIGHT HANG_SECONDS HOSTS NCCL_PROFILE CONDA_ENV; do
    [[ $(grep -c "^launch.sh: warning: $name" <<<"$stderr") == 1 ]]
  done
  SITE=missing/site.env run launch --dry-run x.py # a path can only be meant for us
  [[ $status == 2 && $output == *"SITE names 'missing/site.env', which cannot be read"* ]]
}

# Variables of the user's that a script of ours might assign.
OTHERS=(HERE FILE ROOT PROGRAM LIB FOLDER INSIDE SUBMITTED ACTIVATED SITE_ROW WAIT_S READERS MIB NAME
  SCRIPT s name script before after file line value number names codes print found code check conda path
  real folder first named archive part size reader readers facts link cure packed why steps train salloc)

@test "the ranks see the user's own variables, whatever their names" {
  cat >seen.py <<'PY'
import os, sys
print("seen", [name for name in sys.argv[1:] if os.environ.get(name) != f"my {name}"])
PY
  local mine=() name script
  for name in "${OTHERS[@]}"; do mine+=("$name=my $name"); done
  run env "${mine[@]}" "$ROOT/scripts/launch.sh" seen.py "${OTHERS[@]}"
  [[ $status == 0 && $output == *"seen []"* ]]

  # What each script becomes shows the variables instead, here and from a copy that SLURM runs.
  # shellcheck disable=SC2016 # the tool expands it
  fake_tool python3.fake '[[ $1 != -S ]] || exit 42; exec env'
  mkdir spool
  for script in {launch,run_ddp,cluster_train,test_distributed} slurm/slurm_train{,_single_node} pbs/pbs_train \
    ssh/launch_{multinode,pdsh_multinode,singlenode,torchrun_auto,torchrun_multinode}; do
    cp -- "$ROOT/scripts/$script.sh" spool/slurm_script
    for name in "$ROOT/scripts/$script.sh" spool/slurm_script; do
      run env "${mine[@]}" PYTHON=python3.fake SLURM_SUBMIT_DIR="$ROOT" PBS_O_WORKDIR="$ROOT" bash "$name" x
      [[ $status == 0 && $(grep -cE '^([A-Za-z_]+)=my \1$' <<<"$output") == "${#OTHERS[@]}" ]]
    done
  done
  run env "${mine[@]}" "$ROOT/scripts/stage_env.sh" --run archive folder env x=1
  [[ $status == 0 && $(grep -cE '^([A-Za-z_]+)=my \1$' <<<"$output") == "${#OTHERS[@]}" ]]
}

# Shows the Python that a dry run would use, after a warning about a variable.
python_of() { # <variable>... <command>
  local output
  output=$(env --unset=PYTHON --unset=LAUNCH_PYTHON "$@" "$ROOT/scripts/launch.sh" --dry-run x.py 2>&1)
  sed -nE 's/^launch.sh: warning: ([A-Z_]+) is .*/\1/p; s|^cd .* env .* (/[^ ]*/bin/python[^ ]*) .*/agent.py .*|\1|p' <<<"$output" | paste -sd' '
}

@test "PATH's Python wins over an environment that was removed, or that PATH does not lead to" {
  touch x.py
  local ours=${PYTHON%/*} plain=/usr/bin:/bin
  mkdir -p other/bin shims scripts/lib
  cat >other/bin/python <<<'exit 1' # without torch
  chmod +x other/bin/python
  [[ $(python_of VIRTUAL_ENV=/gone PATH="$ours:$PATH") == "VIRTUAL_ENV $ours/python" ]]
  [[ $(python_of VIRTUAL_ENV="$PWD/other" PATH="$ours:$PATH") == "VIRTUAL_ENV $ours/python" ]]
  [[ $(python_of CONDA_PREFIX=/gone CONDA_DEFAULT_ENV=x PATH="$ours:$PATH") == "CONDA_PREFIX $ours/python" ]]
  [[ $(python_of VIRTUAL_ENV="${ours%/*}" PATH="$ours:$PATH") == "$ours/python" ]]
  # A shell that resets PATH keeps VIRTUAL_ENV; only there is torch.
  ln -s "$PWD/other/bin/python" shims/python
  [[ $(python_of VIRTUAL_ENV="${ours%/*}" PATH="$PWD/shims:$plain") == "$ours/python" ]]
  touch types.py # a user's file with the name of one of Python's modules is not imported
  [[ $(python_of VIRTUAL_ENV="$PWD/other" PATH="$ours:$PATH") == "VIRTUAL_ENV $ours/python" ]]
  rm types.py
  # pyenv's python is a script that starts the environment's.
  rm shims/python
  printf '#!/bin/sh\nexec %q "$@"\n' "$ours/python" >shims/python
  chmod +x shims/python
  [[ $(python_of VIRTUAL_ENV="${ours%/*}" PATH="$PWD/shims:$plain") == "$ours/python" ]]
  run env --unset=PYTHON VENV=/gone PATH="$ours:$PATH" "$ROOT/scripts/launch.sh" --dry-run x.py
  assert_refused 3 "VENV names '/gone', which has no bin/python; correct VENV" env-missing
}

@test "CDPATH: PATH and the project's folder are as without it" {
  mkdir -p "elsewhere/${PYTHON%/*/*}" elsewhere/scripts/lib
  ln -s "${PYTHON%/*/*}" mine
  echo 'import os; print(repr(os.environ["PATH"].partition(":")[0]))' >x.py
  ln -s "$ROOT/scripts" scripts
  CDPATH=$PWD/elsewhere:$PWD PYTHON='' VENV=mine SKIP_PREFLIGHT=1 run --separate-stderr scripts/launch.sh x.py
  [[ $status == 0 && $output == "'$PWD/mine/bin'" ]]
}

@test "a function cd that prints, and a folder whose name is not UTF-8" {
  mkdir J$'\xfc'
  cd J$'\xfc'
  touch x.py
  cd() { builtin cd "$@" && ls; }
  export -f cd
  run --separate-stderr launch --dry-run x.py
  [[ $status == 0 && $output == "# node 0 "* && $output == *" x.py" ]]
}

# bats test_tags=slow
@test "a Turkish locale: variables and settings are compared as in the C locale" {
  mkdir locale && localedef -i tr_TR -f UTF-8 "$PWD/locale/tr_TR.UTF-8" || skip "this machine has no Turkish locale"
  touch x.py
  export LOCPATH=$PWD/locale LC_ALL=tr_TR.UTF-8
  PET_RDZV_ID=mine run --separate-stderr launch --dry-run x.py
  [[ $status == 0 && $output$stderr == *"run        mine"* ]]
  run "$ROOT/scripts/ssh/launch_singlenode.sh" plain.yaml 1 train.max_steps=1 --dry-run
  [[ $status == 0 && $output == *" train.max_steps=1"* ]]
}

# The nodes that a dry run would start over ssh, each with its number of ranks.
nodes_of() { # <argument...>
  launch --dry-run "$@" | sed -nE "s|^ssh .*-- ([^ ]+) .*agent.py .*--nproc-per-node ([0-9]+) .*x.py --a=1.*|\\1:\\2|p" | paste -sd' '
}

@test "--hosts: a list, or a file" {
  touch x.py
  printf 'node1\nnode2 slots=3\n' >nodes.txt
  [[ $(nodes_of --hosts 'node[1-2],node3:4' --nproc-per-node 2 x.py --a=1) == "node1:2 node2:2 node3:4" ]]
  [[ $(nodes_of --hosts nodes.txt --nproc-per-node 2 x.py --a=1) == "node1:2 node2:3" ]]
  local many
  many=$(printf 'node%04d.cluster\n' {1..40} | paste -sd,) # longer than any file name
  [[ $(nodes_of --hosts "$many" --nproc-per-node 2 x.py --a=1 | wc -w) == 40 ]]
  run launch --dry-run --hosts node1,node2 --via pdsh --nproc-per-node 2 x.py
  [[ $status == 0 && $output == *"pdsh -R ssh -S -w node2 "* ]]
}

@test "--hosts: a bad list is refused in one line" {
  touch x.py
  run launch --hosts job x.py
  assert_refused 2 "--hosts job: not inside a SLURM or PBS job (no SLURM_JOB_ID, no file at PBS_NODEFILE)" ""
  run launch --hosts node1,node2 --nnodes 2 x.py
  assert_refused 2 "--hosts and --nnodes both name the nodes" ""
  run launch --via pdsh x.py
  assert_refused 2 "--via pdsh: give ssh or pdsh, and the nodes with --hosts" ""
  run launch --hosts node1 --via rsh x.py
  assert_refused 2 "--via rsh: give ssh or pdsh, and the nodes with --hosts" ""
}

# bats test_tags=slow
@test "a run that is stopped before its ranks start is kept, and explained" {
  local code=0
  echo pass >x.py
  RUN_ID=early "$ROOT/scripts/launch.sh" x.py 2>err &
  timeout 60 bash -c "until [[ -e logs/early/run.json ]]; do sleep 0.02; done"
  kill -TERM $!
  wait $! || code=$?
  [[ $code == 143 ]]
  [[ $(tail -1 err) == "stopped  by SIGTERM (code 143); nothing is left running" ]]
  [[ $(<logs/early/failure.txt) == "$(tail -1 err)" ]]
  grep -F '"command": "' logs/early/run.json | grep -F 'scripts/launch.sh x.py"'
  run "$ROOT/scripts/explain.sh" early
  [[ $status == 0 && $output == "$(tail -1 err)" ]]
}

# bats test_tags=slow
@test "a reader that the shell began, as in > >(tee log), gets the failure block" {
  echo 'import os, signal; os.kill(os.getppid(), signal.SIGKILL)' >kills.py # the node agent
  ROOT=$ROOT run bash -c 'exec > >(while read -r line; do echo "read $line"; done >log; touch over) 2>&1; exec "$ROOT/scripts/launch.sh" kills.py'
  [[ $status == 137 ]]
  timeout 60 bash -c "until [[ -e over ]]; do sleep 0.05; done" # the reader outlives the launcher
  grep -q '^read FAILED   node agent 0 .*\[agent-killed\]$' log
  [[ $(tail -n 1 log) == "read see      TROUBLESHOOTING.md#agent-killed" ]]
}

# bats test_tags=slow
@test "a notice waits until the ranks handle it, also while torch is imported" {
  cat >handles.py <<'PY'
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: (print("handled", flush=True), sys.exit(5)))
signal.alarm(60)  # ends a test that fails
signal.pause()
PY
  mkdir slow
  cat >slow/sitecustomize.py <<'PY'
import os, signal, sys
def signal_once(event, given):
    if event == "import" and given[0] == "torch" and sys.argv[0].endswith("agent.py"):
        os.kill(os.getppid(), signal.SIGUSR1)
sys.addaudithook(signal_once)
PY
  PYTHONPATH=$PWD/slow run launch handles.py
  [[ $status == 5 && $output == *handled* ]]
}

@test "a signal before Python starts: a line, and the signal's code" {
  local name
  for name in HUP USR1 USR2 TERM; do
    fake_tool checks "kill -$name \$PPID; exit 42" # as the check of Python's version
    PYTHON=checks run env --default-signal=HUP "$ROOT/scripts/launch.sh" kills.py
    [[ $output == "stopped  by SIG$name; nothing was started" ]]
    ((status == 128 + $(kill -l "$name")))
  done
}
