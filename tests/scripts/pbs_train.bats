#!/usr/bin/env bats
# shellcheck disable=SC2030,SC2031 # each test is a subshell, on purpose
bats_require_minimum_version 1.5.0
load helper

# Runs a copy of the script as PBS does: under the job's name, and outside the folder of qsub.
launch() {
  cp -- "$ROOT/scripts/pbs/pbs_train.sh" 7.host.SC
  (cd / && PBS_JOBID=7.host PBS_O_WORKDIR=$OLDPWD PBS_NODEFILE=$OLDPWD/nodes "$OLDPWD/7.host.SC" "$@")
}

# What OpenPBS 23.06 showed for a job of two nodes.
fake_qstat() {
  fake_tool qstat "cat '$ROOT/tests/cluster/pbs/qstat-f-running.txt'"
}

# OpenPBS's qsub: its options, and either one script or `--` with a program and its arguments.
fake_qsub() {
  # shellcheck disable=SC2016 # expanded by qsub
  fake_tool qsub '[[ $1 != --version ]] || { echo pbs_version = 23.06.06 && exit; }
OPTARG="" all=("$@")
while getopts :a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:P:q:r:R:S:u:v:VW:Xz letter; do
  [[ $letter != [:?] ]] || { echo "qsub: invalid option -- ${OPTARG@Q}" >&2 && exit 2; }
done
shift $((OPTIND - 1))
if [[ ${all[OPTIND - 2]} == -- ]]; then [[ -x ${1:-} && $1 == /* ]]; else (($# == 1)) && [[ -r $1 ]]; fi ||
  { echo "usage: qsub [-a date_time] ..." >&2 && exit 2; }
printf "%s\n" "${all[@]}" >qsub.words
echo 7.head'
}

# The run was refused: only the folder for the job's output exists, and is empty.
assert_refused_in_job() { # <exit code> <text>
  rmdir logs
  assert_refused "$@"
}

setup_folder() {
  ln -s -- "$ROOT"/{config,scripts} .
  printf '%s\n' n2 n2 n1 n1 >nodes
}

# bats test_tags=slow
@test "the nodes of the node file, in its order, each with as many processes as it has lines" {
  setup_folder
  fake_qstat
  run launch --dry-run
  [[ $status == 0 && $output == *"run        7.host "*"n2 (master, n2:"*"  n1"*"4 = 2 nodes x 2"* ]]
  [[ $output == *"'LAUNCH_COMMAND=qsub -V -N train -l walltime=24:00:00 -j oe -o /home/user/kit/logs/ -l select=2:ncpus=2:mpiprocs=2 -l place=scatter -- $PWD/scripts/pbs/pbs_train.sh'"* ]]
  TRAIN_SCRIPT=x CONFIG=- run launch a=1 resume=never --dry-run -- 2
  [[ $output == *"LAUNCH_COMMAND=TRAIN_SCRIPT=x"*" CONFIG=-"*" qsub"*" -V"*" -- "*"/scripts/pbs/pbs_train.sh a=1 -- 2'"* ]]
  fake_tool qstat false # then the command for a job of this size is unknown
  run launch --dry-run
  [[ $status == 0 && $output == *" LAUNCH_COMMAND= "* ]]
  NPROC_PER_NODE=4 CONFIG=plain.yaml run launch --dry-run
  [[ $output == *"plain.yaml"*"8 = 2 nodes x 4"* ]]
}

@test "nodes listed once: one process for each GPU" {
  setup_folder
  printf '%s\n' n1 n2 >nodes
  fake_gpus 4
  run launch plain.yaml --dry-run
  [[ $status == 0 && $output == *"8 = 2 nodes x 4, nccl"* ]]
}

# bats test_tags=slow
@test "chunks that PBS packs on one node: one process for each GPU that qstat reports, or a warning" {
  setup_folder
  printf '%s\n' n1 n1 >nodes
  fake_gpus 8
  run launch plain.yaml --dry-run
  [[ $status == 0 && $output == *"2 = 1 node x 2, nccl"* ]]
  [[ $output == *"warning    n1 has 8 GPUs, but 2 lines in the node file; NPROC_PER_NODE overrides them"* ]]
  fake_tool qstat 'echo "    schedselect = 2:ncpus=16:ngpus=4"'
  run launch plain.yaml --dry-run
  [[ $status == 0 && $output == *"8 = 1 node x 8, nccl"* && $output != *"warning"* ]]
}

@test "a copy far from the project: exit 3, and what to do" {
  touch nodes
  run launch plain.yaml
  [[ $status == 3 && $output == "pbs_train.sh: this copy cannot find scripts/lib; submit it from the project's folder or the one containing launch-kit/ [env-missing]" ]]
}

@test "outside a job: exit 2, and what to do" {
  run "$ROOT/scripts/pbs/pbs_train.sh" plain.yaml
  assert_refused 2 "this is not a PBS job; ask for nodes with qsub -l select=2:ncpus=16:ngpus=4 (PBS Pro, OpenPBS) or qsub -l nodes=2:ppn=4 (Torque)"
}

@test "a job of another size than requested: exit 2, and the options of PBS Pro and of Torque" {
  setup_folder
  PBS_NUM_NODES=3 run launch plain.yaml
  assert_refused_in_job 2 "the job's node file has 2 nodes, but should have 3; ask for nodes with qsub -l select=2:ncpus=16:ngpus=4 (PBS Pro, OpenPBS) or qsub -l nodes=2:ppn=4 (Torque)"
  : >nodes
  run launch plain.yaml
  assert_refused_in_job 2 "the job's node file has 0 nodes, but should have some; ask for nodes with qsub"
}

@test "the script itself requests no nodes, because PBS Pro and Torque reject each other's options" {
  run grep -E '^#PBS .*(select|nodes)=' "$ROOT/scripts/pbs/pbs_train.sh"
  [[ $status == 1 ]]
  run "$ROOT/scripts/pbs/pbs_train.sh" plain.yaml --dry-run
  [[ $status == 0 && $output == *"chosen by the scheduler"*" && qsub -V "*pbs_train.sh* ]]
}

@test "outside a job, --dry-run prints a command that OpenPBS accepts" {
  setup_folder
  fake_qsub
  local words=(-V -N train -l walltime=24:00:00 -j oe -o logs/ -l select=1:ncpus=2:mpiprocs=2 --)
  TRAIN_SCRIPT=own.py NPROC_PER_NODE=2 run scripts/pbs/pbs_train.sh plain.yaml "a.b=1  2" --dry-run -- "--x=\$y"
  [[ $status == 0 && $output == *"set the job's size in the command"* ]]
  bash -c "${lines[-1]}" # it contains TRAIN_SCRIPT
  diff <(printf '%s\n' "${words[@]}" "$PWD/scripts/pbs/pbs_train.sh" plain.yaml "a.b=1  2" -- "--x=\$y") qsub.words
  run qsub -V -F plain.yaml scripts/pbs/pbs_train.sh # OpenPBS's answer to Torque's option
  [[ $status == 2 && $output == "qsub: invalid option -- 'F'" ]]
}

@test "the resume line of a job requests what the job had, and OpenPBS accepts it" {
  setup_folder
  fake_qstat
  fake_qsub
  TRAIN_SCRIPT=own.py PBS_O_QUEUE=workq run launch plain.yaml "a.b=x  y" --dry-run
  local words
  words=(-V -N train -l walltime=24:00:00 -j oe -o /home/user/kit/logs/)
  words+=(-l select=2:ncpus=2:mpiprocs=2 -l place=scatter -q workq --)
  # shellcheck disable=SC2016 # expanded by the tools
  {
    fake_tool ssh 'exec bash -c "${@: -1}"' # what a node would run
    fake_tool env '[[ $2 == LAUNCH_COMMAND=* ]] && printf "%s\n" "${2#*=}" >resume'
  }
  bash -c "${lines[-1]}"
  grep -q '^TRAIN_SCRIPT=own.py ' resume
  bash -c "$(<resume)"
  diff <(printf '%s\n' "${words[@]}" "$PWD/scripts/pbs/pbs_train.sh" plain.yaml "a.b=x  y") qsub.words
}

# bats test_tags=slow
@test "each launch in a job is a separate run; in a job of one node, without ssh; and qsub's -v reaches the ranks" {
  setup_folder
  echo n1 >nodes
  fake_qstat # qstat then shows -v X=1
  fake_tool ssh 'echo "connect to host n1 port 22: Connection refused" >&2; exit 255'
  echo 'import os; print("X is", os.environ["X"])' >own.py
  export PBS_JOBID=1.head PBS_NODEFILE=nodes TRAIN_SCRIPT=own.py X=1
  PBS_O_QUEUE=workq run scripts/pbs/pbs_train.sh -
  [[ $status == 0 && $output == *"run        1.head"*"X is 1"* ]]
  grep -q '"command": "TRAIN_SCRIPT=own.py FORWARD_ENV=X X=1 .*qsub -V .* -l place=scatter -q workq -- .*/pbs_train.sh -"' logs/1.head/run.json
  grep -q '"submitted": "Thu Nov 26 08:40:51 2026"' logs/1.head/lock
  run scripts/run_ddp.sh -n 1 -c - --dry-run
  [[ $status == 0 && $output == *"run        1.head.1"* ]]
}

@test "messages begin with the script's name, and the folder for PBS's output exists" {
  setup_folder
  run launch nosuch.yaml
  assert_refused_in_job 2 "there is no config file 'nosuch.yaml'"
  [[ $output == "pbs_train.sh: "* ]]
  cp -- "$ROOT/scripts/run_ddp.sh" 7.host.SC
  PBS_O_WORKDIR=$PWD run ./7.host.SC -c nosuch.yaml
  [[ $output == "run_ddp.sh: "* ]]
}

@test "in an interactive job, it stays where it was typed" {
  setup_folder
  PBS_ENVIRONMENT=PBS_INTERACTIVE PBS_JOBID=7.host PBS_O_WORKDIR=/tmp PBS_NODEFILE=$PWD/nodes \
    run scripts/pbs/pbs_train.sh plain.yaml --dry-run
  [[ $status == 0 && $output == *"cd $PWD && "* ]]
}

@test "other scripts that qsub was given directly leave the home folder; in a shell of the job, they stay" {
  mkdir work
  echo pass | tee work/own.py >~/own.py
  local script words
  export PBS_ENVIRONMENT=PBS_BATCH PBS_O_WORKDIR=$PWD/work TRAIN_SCRIPT=own.py
  for script in launch run_ddp test_distributed; do
    words=(--dry-run)
    [[ $script != launch ]] || words+=(own.py)
    cp -- "$ROOT/scripts/$script.sh" ~/7.host.SC
    ln -sfn -- "$ROOT/scripts" work/scripts
    cd
    run ~/7.host.SC "${words[@]}"
    cd "$PBS_O_WORKDIR/.."
    [[ $status == 0 ]]
    [[ $script == test_distributed || $output == *"cd $PBS_O_WORKDIR && "* ]]
    [[ $script != test_distributed || $output == *"--log-dir $PBS_O_WORKDIR/logs"* ]]
  done
  ln -s -- "$ROOT/scripts" ~/kit
  cd
  run kit/launch.sh --dry-run own.py
  [[ $status == 0 && $output == *"cd $HOME && "* ]]
}

# What follows `--` of qsub gets this environment; X/bin is the folder of PBS's commands.
without_shell() { # <words of pbs_train.sh...>
  mkdir -p X
  [[ -e X/bin ]] || mv fake X/bin
  env -i HOME="$HOME" PATH=/bin:/usr/bin PBS_CONF_FILE="$PWD/pbs.conf" PYTHON="$PYTHON" PBS_JOBID=1.head PBS_QUEUE=workq \
    PBS_NODEFILE="$PWD/nodes" PBS_O_WORKDIR="$PWD" NCPUS=4 OMP_NUM_THREADS=4 "$PWD/scripts/pbs/pbs_train.sh" "$@"
}

# bats test_tags=slow
@test "started by PBS without a shell, the launcher finds PBS's commands; if it cannot, it says so" {
  setup_folder
  fake_tool qstat "[[ \$1 == -f ]] || exec echo '    kill_delay = 15'; cat '$ROOT/tests/cluster/pbs/qstat-f-running.txt'"
  printf '# PBS_EXEC=/nowhere\nPBS_SERVER=head\nPBS_EXEC="%s"\n' "$PWD/X" >pbs.conf
  run without_shell plain.yaml --dry-run
  echo "$output"
  [[ $status == 0 && $output == *"LAUNCH_COMMAND="*"qsub -V "*" -l select=2:ncpus=2:mpiprocs=2 "* ]]
  [[ $output == *"warning: a stop can take 40 s (GRACE + 10), but PBS kills this job 15 s after "* ]]
  [[ $output != *"not known"* ]]
  rm pbs.conf
  run without_shell plain.yaml --dry-run
  [[ $status == 0 && $output == *" LAUNCH_COMMAND= "* ]]
  [[ ${lines[0]} == "pbs_train.sh: warning: qstat is neither in PATH nor in PBS_EXEC of $PWD/pbs.conf; without it, the resume line, "*"; submit with qsub -v PATH" ]]
}

@test "a qdel before the ranks start, while bash or Python waits: code 143, one line, and nothing is left" {
  local code where session
  setup_folder
  cp -- "$ROOT/scripts/pbs/pbs_train.sh" 7.host.SC
  for where in qstat slow-python; do # PBS signals all processes of the job's session at once
    fake_tool "$where" "touch $where; exec sleep 600"
    [[ $where == qstat ]] || export PYTHON=slow-python
    code=0
    PBS_JOBID=7.host PBS_O_WORKDIR=$PWD PBS_NODEFILE=$PWD/nodes \
      setsid ./7.host.SC plain.yaml >"$where.out" 2>&1 3>&- &
    session=$!
    until [[ -e $where ]]; do sleep 0.1; done
    pkill -TERM -s "$session"
    wait "$session" || code=$?
    cat "$where.out"
    ((code == 143))
    # bash adds a line, and so does a wait of 2 s.
    [[ $(grep -vxE 'Terminated|waiting up to 10 s for qstat .*' "$where.out") == "stopped  by SIGTERM; nothing was started" ]]
    run ! pgrep -s "$session"
  done
}
