#!/usr/bin/env bats
# shellcheck disable=SC2030,SC2031 # each test is a subshell, on purpose
bats_require_minimum_version 1.5.0
load helper

launch() {
  "$ROOT/scripts/ssh/launch_singlenode.sh" "$@"
}

@test "--help: usage, an example, the environment" {
  run launch --help
  [[ $status == 0 ]]
  [[ $output == *"usage: scripts/ssh/launch_singlenode.sh CONFIG"* ]]
  [[ $output == *"example: "* && $output == *MASTER_PORT* && $output == *--dry-run* ]]
  [[ $output != *"set -euo"* ]]
}

@test "--dry-run: the plan and the golden command" {
  export RUN_ID=golden MASTER_PORT=23456
  run --separate-stderr launch plain.yaml 2 seed=3 --dry-run -- --log-level INFO
  [[ $status == 0 ]]
  assert_output "# node 0 ($HOST): ranks 0-1 of 2, rendezvous 127.0.0.1:23456
$(golden_command "MASTER_PORT=23456 $ROOT/scripts/ssh/launch_singlenode.sh plain.yaml 2 seed=3 -- --log-level INFO" \
    1 0 2 127.0.0.1 "$ROOT/train.py --config plain.yaml seed=3 --log-level INFO")"
  # shellcheck disable=SC2154 # set by run
  [[ $stderr == "run        golden    plain.yaml
hosts      $HOST (master, 127.0.0.1:23456)
ranks      2 = 1 node x 2, gloo
batch      2 samples a step = 2 ranks x 1
preflight  not run (--dry-run)
logs       logs/golden/   (tail -f logs/node_*.log)" ]]
  [[ ! -e logs ]]
}

# bats test_tags=slow
@test "the command of --dry-run runs when pasted, from any folder" {
  make_dump
  make_config "$ODD_CONFIG"
  launch "$ODD_CONFIG" 1 "${ODD_SETTINGS[@]}" --dry-run -- "${ODD_REST[@]}" >command.sh
  (cd / && bash "$OLDPWD/command.sh")
  assert_odd_dumped
}

# bats test_tags=slow
@test "the number of processes: the argument, then NPROC_PER_NODE, then the GPUs, then one" {
  run launch plain.yaml --dry-run
  [[ $output == *"1 = 1 node x 1, gloo"* ]]
  fake_gpus 4
  run launch plain.yaml --dry-run
  [[ $output == *"4 = 1 node x 4, nccl"* ]]
  NPROC_PER_NODE=3 run launch plain.yaml --dry-run
  [[ $output == *"3 = 1 node x 3"* ]]
  NPROC_PER_NODE=3 run launch plain.yaml 2 --dry-run
  [[ $output == *"2 = 1 node x 2"* ]]
  CUDA_VISIBLE_DEVICES=0,2 run launch plain.yaml --dry-run
  [[ $output == *"2 = 1 node x 2"* ]]
}

@test "BACKEND, LOG_LEVEL, GRACE and MAX_RESTARTS reach the agent" {
  export BACKEND=gloo LOG_LEVEL=DEBUG GRACE=5 MAX_RESTARTS=2
  run --separate-stderr launch plain.yaml 1 --dry-run
  [[ $output == *" LOG_LEVEL=DEBUG BACKEND=gloo GRACE=5 "* ]]
  [[ $output == *" --max-restarts 2 $ROOT/train.py --config plain.yaml --distributed-backend gloo" ]]
}

# bats test_tags=slow
@test "TRAIN_SCRIPT: the config under its flag, then settings, then the rest, and nothing else" {
  export TRAIN_SCRIPT=own.py BACKEND=gloo
  run --separate-stderr launch plain.yaml 1 x.y=1 --dry-run -- -v
  [[ $output == *" own.py --config plain.yaml x.y=1 -v" ]]
  CONFIG_FLAG=--preset run --separate-stderr launch small 1 --dry-run
  [[ $output == *" own.py --preset small" ]]
  run --separate-stderr launch - 1 --dry-run
  [[ $output == *" own.py" ]]
}

# bats test_tags=slow,long
@test "TRAIN_SCRIPT: a module, and its path" {
  make_module
  run --separate-stderr launch - 2 -- x
  [[ $status == 0 && $output == "pkg.mod 1 of 2: x" ]]
  TRAIN_SCRIPT=pkg/mod.py run --separate-stderr launch - 2 -- x
  [[ $status == 0 && $output == "pkg.mod 1 of 2: x" ]]
}

# bats test_tags=slow
@test "a plain training script, two processes: its output, its exit code" {
  cat >own.py <<'PY'
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("total", int(total), flush=True)
dist.destroy_process_group()
sys.exit(7 * dist.is_initialized())
PY
  TRAIN_SCRIPT=own.py RUN_ID=own run --separate-stderr launch - 2
  [[ $status == 0 && $output == "total 2" ]]
  grep -q '^\[1\] total 2' logs/own/node_0.log
  [[ $stderr =~ preflight\ \ 23\ checks\ on\ 1\ node ]]
}

# bats test_tags=slow,long
@test "arguments arrive byte for byte" {
  make_dump
  make_config "$ODD_CONFIG"
  launch "$ODD_CONFIG" 1 "${ODD_SETTINGS[@]}" -- "${ODD_REST[@]}"
  assert_odd_dumped
}

@test "bad arguments: exit 2, one line" {
  run launch
  assert_refused 2 "no config; usage: scripts/ssh/launch_singlenode.sh CONFIG"
  run launch ""
  assert_refused 2 "there is no config file ''"
  run launch $'missing\n.yaml' 2
  assert_refused 2 "there is no config file 'missing\n.yaml'; give"
  run launch plain.yaml 0
  assert_refused 2 "the number of processes is '0'; give a whole number from 1"
  RUN_ID=latest run launch plain.yaml 1
  assert_refused 2 "RUN_ID is 'latest', a name that is reserved in the log folder"
  PYTHON=$(type -P true) run launch plain.yaml 1
  assert_refused 3 "is not a Python interpreter; fix PYTHON" env-missing
  run launch plain.yaml abc
  assert_refused 2 "the number of processes is 'abc'"
  run launch plain.yaml ""
  assert_refused 2 "the number of processes is ''"
  run launch plain.yaml 2 3
  assert_refused 2 "unexpected argument '3'"
  run launch plain.yaml 2 --fast
  assert_refused 2 "unknown option '--fast'; see launch_singlenode.sh --help, and put the training script's own options after --"
  # shellcheck disable=SC2016 # must not be expanded
  run launch plain.yaml '-x[$(touch file)]' 2
  assert_refused 2 "unknown option '-x[\$(touch file)]'"
  [[ ! -e file ]]
}

# bats test_tags=slow
@test "bad configs: exit 2, one line" {
  echo "seed: [1" >broken.yaml
  run launch broken.yaml 2
  assert_refused 2 broken.yaml
  run launch plain.yaml 2 sed=1
  assert_refused 2 "did you mean"
  run launch plain.yaml 2 train.max_stepz=3
  assert_refused 2 train.max_steps
  run launch plain.yaml 2 train.max_steps=many
  assert_refused 2 train.max_steps
}

@test "groups of fsdp that do not fit the ranks: exit 2, nothing started" {
  unset TRAIN_SCRIPT
  run launch "$ROOT/config/local3.yaml" 2 distributed.strategy=fsdp distributed.fsdp.shard=3
  assert_refused 2 "fsdp.shard: 2 ranks cannot be split into groups of 3; use all, or a divisor of 2" wrong-world
}

@test "no Python: exit 3, one line" {
  PYTHON=no/such/python run launch plain.yaml 1
  assert_refused 3 "$HOST: there is no Python at 'no/such/python'; set PYTHON to Python 3.10 or newer" "env-missing"
  unset PYTHON
  VENV=nowhere run launch plain.yaml 1
  assert_refused 3 "VENV names 'nowhere', which has no bin/python; correct VENV"
  mkdir -p made/bin && ln -s /away/python3.11 made/bin/python # made by another user or elsewhere
  VENV=made run launch plain.yaml 1
  assert_refused 3 "has no bin/python (a link to /away/python3.11, which $(id -un) cannot run here); correct VENV"
  PYTHON=made/bin/python run launch plain.yaml 1
  assert_refused 3 "'made/bin/python' (a link to /away/python3.11, which $(id -un) cannot run here); set PYTHON"
  MODULES=cuda run launch plain.yaml 1
  assert_refused 3 "no module command"
  local PATH=$PATH
  bare_path
  CONDA_ENV=mine run launch plain.yaml 1
  assert_refused 3 "there is no conda on PATH"
  [[ -x $ROOT/.venv/bin/python ]] && return
  run launch plain.yaml 1
  assert_refused 3 "there is no Python at 'python3'; set PYTHON to"
}

@test "CONDA_ENV and MODULES are activated, in that order" {
  mkdir -p conda/bin conda/etc/profile.d
  echo "conda() { echo \"\$* after \$LOADED\" >conda.said; PATH=$PWD/env:\$PATH; }" >conda/etc/profile.d/conda.sh
  mkdir env modules
  printf '#!/bin/sh\nexec %q "$@"\n' "$PYTHON" >env/python # through a link, it finds no packages
  chmod +x env/python
  mkdir -p modules/init
  # shellcheck disable=SC2016 # expanded by the function
  echo 'module() { false; LOADED="$*$UNSET"; }' >modules/init/bash
  sed -i '1i false # as sites have it; bash -e would end here' conda/etc/profile.d/conda.sh modules/init/bash
  unset PYTHON
  CONDA_EXE=$PWD/conda/bin/conda CONDA_ENV=mine MODULESHOME=$PWD/modules MODULES="cuda/12 gcc" \
    run --separate-stderr launch plain.yaml 1 --dry-run
  [[ $(<conda.said) == "activate mine after load cuda/12 gcc" ]]
  [[ $output == *" $PWD/env/python $ROOT/scripts/lib/agent.py "* ]]
}

@test "more processes than GPUs: exit 3" {
  fake_gpus 2
  run launch plain.yaml 3
  # If torch lacks CUDA, a second fault follows.
  [[ $status == 3 && ${lines[0]} == *"$HOST: 3 processes, but only 2 visible GPUs; "*"[too-few-gpus]" && ! -e logs ]]
}

@test "BACKEND=nccl without a GPU: exit 3" {
  [[ ! -e /dev/nvidiactl && ! -e /dev/kfd && ! -e /dev/dxg ]] || skip "this machine has a GPU"
  BACKEND=nccl run launch plain.yaml 2
  assert_refused 3 "$HOST: backend nccl needs a GPU, but there is none; set BACKEND=gloo" too-few-gpus
}

# bats test_tags=slow
@test "a port in use: exit 3, and who holds it" {
  coproc "$PYTHON" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1], flush=True); input()'
  local port
  read -r port <&"${COPROC[0]}"
  MASTER_PORT=$port run launch plain.yaml 1
  assert_refused 3 "$HOST: port $port is taken by pid $COPROC_PID (" "port-in-use"
}

# bats test_tags=slow
@test "every fault of the preflight in one list, warnings refuse with --strict" {
  export TRAIN_SCRIPT=missing.py LOG_DIR=plain.yaml/logs
  run launch - 1
  [[ $status == 3 && ${#lines[@]} == 2 ]]
  [[ ${lines[0]} == *"env-missing"* && ${lines[1]} == *"dir-unwritable"* ]]
  unset LOG_DIR
  ulimit -n 512
  echo 'raise SystemExit' >warned.py
  TRAIN_SCRIPT=warned.py run launch - 1 --strict
  assert_refused 3 "$HOST: the limit on open files is 512 (data workers need 1024); run ulimit -n" "low-nofile"
  TRAIN_SCRIPT=warned.py run launch - 1
  [[ $status == 0 && ${lines[0]} == *"warning: "*"[low-nofile]" && $output == *"23 checks on 1 node: 1 warning in"* ]]
}

# bats test_tags=slow,long
@test "SKIP_PREFLIGHT=1 skips the checks" {
  fake_gpus 1
  echo 'raise SystemExit' >own.py
  TRAIN_SCRIPT=own.py SKIP_PREFLIGHT=1 run launch - 2
  [[ $status == 0 && $output == *"preflight  not run (SKIP_PREFLIGHT)"* ]]
}

# bats test_tags=slow
@test "colour on a terminal only, and not with NO_COLOR" {
  type -P script >/dev/null || skip "script is not installed (apt install bsdutils)"
  local line="$ROOT/scripts/ssh/launch_singlenode.sh plain.yaml 1 --dry-run"
  run script -qec "$line" /dev/null
  [[ $output == *$'\e[1mrun'* ]]
  NO_COLOR=1 run script -qec "$line" /dev/null
  [[ $output == *run* && $output != *$'\e'* ]]
  run launch plain.yaml 1 --dry-run
  [[ $output != *$'\e'* ]]
}

# bats test_tags=slow
@test "a copy in a spool folder finds the project" {
  cp "$ROOT/scripts/ssh/launch_singlenode.sh" slurm_script
  SLURM_SUBMIT_DIR=$ROOT SLURM_JOB_ID=42 run --separate-stderr ./slurm_script plain.yaml 1 --dry-run
  [[ $status == 0 && $output == *" --rdzv-id 42 "* ]]
  PBS_O_WORKDIR=$ROOT PBS_JOBID=7.host run --separate-stderr ./slurm_script plain.yaml 1 --dry-run
  [[ $status == 0 && $output == *" --rdzv-id 7.host "* ]]
  sed -i /^PROGRAM=/d slurm_script # an older copy has its name only in its usage
  SLURM_SUBMIT_DIR=$ROOT SLURM_JOB_ID=42 run --separate-stderr ./slurm_script --version
  [[ $status == 0 && $output == "launch_singlenode.sh "* ]]
  PBS_O_WORKDIR=$ROOT PBS_JOBID=7.host run --separate-stderr ./slurm_script plain.yaml 1 --dry-run
  [[ $status == 0 && $output == *" --rdzv-id 7.host "* ]]
}
