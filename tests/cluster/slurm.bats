#!/usr/bin/env bats
# The scripts for SLURM, under a real SLURM.
# shellcheck disable=SC2030,SC2031,SC2153 # each test is a subshell, and is meant to be

bats_require_minimum_version 1.5.0
load helper

ROOT=$(cd -- "$BATS_TEST_DIRNAME/../.." && pwd -P)
SHORT=(train.max_steps=6 train.eval_every=0 train.global_batch_size=12)
SMALL=("${SHORT[@]}" model.layers=1 model.width=16)
LONG=("${SMALL[@]}" train.max_steps=100000 checkpoint.every=0)
BY_THE_WAY='^(srun: |waiting up to |slurm_train.sh: warning: no answer to the preflight)' # if SLURM or the nodes are slow

# A time limit is at least a minute, so the job that reaches its limit runs during the first tests.
setup_file() {
  cluster_up 5 # the guide's commands ask for 4; the job of a lost node needs one more
  cd -- "$BATS_FILE_TMPDIR" || return
  setup_folder
  # The notice comes within the first minute; a busy machine may need some of the nine after it.
  TIMED=$(on login sbatch --parsable --output=timed.out --nodes=1 --gpus-per-node=1 --time=10 --signal=B:USR1@540 \
    scripts/slurm/slurm_train.sh config/local3.yaml "${LONG[@]}")
  export TIMED
}

teardown_file() {
  cluster_down
}

setup() {
  cd -- "$BATS_TEST_TMPDIR" || return
  setup_folder
}

teardown() {
  local node
  [[ -n ${BATS_TEST_COMPLETED:-} ]] && return # a failed test must free its nodes for the next
  on login scancel --user=root
  for node in node{1..5}; do "$CLUSTER" restore "$node"; done
  set_slurmd_timeout 10
}

setup_folder() {
  ln -s -- "$ROOT"/{config,scripts} .
  export PYTHON=${PYTHON:-$ROOT/.venv/bin/python} PYTHONPATH=$ROOT OMP_NUM_THREADS=1
}

# Runs a job to its end; returns its exit code. (sbatch --wait polls only every 10 s.)
job() { # <sbatch's options, the script and its arguments...>
  local code
  JOB=$(on login sbatch --parsable --output=job.out "$@")
  eventually has_ended "$JOB"
  code=$(field "$JOB" ExitCode)
  code=${code#*=}
  return "${code%:*}"
}

weights_of() { # <run id>
  "$PYTHON" -m distributed.checkpoint hash "checkpoints/$1"
}

# Submits a long run; sets JOB when it has taken its first step.
start_long() { # <sbatch's options...>
  JOB=$(on login sbatch --parsable --output=job.out "$@" scripts/slurm/slurm_train.sh config/local3.yaml "${LONG[@]}")
  eventually grep -q '^step ' job.out
}

field() { # <job> <name>
  on login scontrol show job "$1" | grep -oE "\b$2=\S+" | head -n 1
}

# bats test_tags=prove
@test "2 x 2 ends with the same weights as one machine (3 x 2 and 1 x 4 in make prove)" {
  local shape shapes=("2 2") ranks
  [[ -z ${TIMES:-} ]] || shapes+=("3 2" "1 4")
  for shape in "${shapes[@]}"; do
    read -r nodes ranks <<<"$shape"
    RUN_ID=job-$nodes job --nodes="$nodes" --gpus-per-node="$ranks" scripts/slurm/slurm_train.sh config/local3.yaml "${SMALL[@]}" 3>&- &
    RUN_ID=one-$nodes SKIP_PREFLIGHT=1 scripts/ssh/launch_singlenode.sh config/local3.yaml $((nodes * ranks)) "${SMALL[@]}"
    wait $!
    [[ $(weights_of "job-$nodes") == "$(weights_of "one-$nodes")" ]]
  done
  grep -q '^hosts      node1 (master, 127.0.0.1:[0-9]*)$' job.out || cat job.out
}

# bats test_tags=prove,long
@test "tasks, GPUs or one task per rank: three ways to ask for the same ranks" {
  RUN_ID=gpus job --nodes=1 --gpus-per-node=2 scripts/slurm/slurm_train.sh config/local3.yaml "${SHORT[@]}"
  RUN_ID=tasks job --ntasks-per-node=2 --gres=gpu:2 scripts/slurm/slurm_train_single_node.sh config/local3.yaml "${SHORT[@]}"
  RUN_ID=srun LAUNCHER=srun job --nodes=2 --ntasks-per-node=1 scripts/slurm/slurm_train.sh config/local3.yaml "${SHORT[@]}" || true
  grep -q 'LAUNCHER=srun needs .* tasks per node.*\[wrong-world\]$' job.out
  RUN_ID=srun LAUNCHER=srun job --nodes=1 --ntasks-per-node=2 scripts/slurm/slurm_train.sh config/local3.yaml "${SHORT[@]}"
  [[ $(weights_of gpus) == "$(weights_of tasks)" && $(weights_of gpus) == "$(weights_of srun)" ]]
}

# bats test_tags=prove,long
@test "--gpus with --ntasks-per-gpu, and sbatch's options as variables, give the requested ranks" {
  job --gpus=4 --ntasks-per-gpu=1 scripts/slurm/slurm_train.sh config/local3.yaml "${SHORT[@]}"
  grep -q '^ranks      4 = 2 nodes x 2, gloo$' job.out
  rm job.out
  SBATCH_EXPORT=NONE SBATCH_TIMELIMIT=5 job --nodes=2 --gpus-per-node=1 scripts/slurm/slurm_train.sh config/local3.yaml "${SHORT[@]}"
  grep -q '^ranks      2 = 2 nodes x 1, gloo$' job.out
  [[ $(field "$JOB" TimeLimit) == TimeLimit=00:05:00 ]]
}

# bats test_tags=prove,long
@test "the run's secret reaches every node, even under --export=NONE, but neither ps nor the log" {
  local forwarded
  "$CLUSTER" run node1 bash -c 'while sleep 0.05; do ps -eo args; done' >ps.out 3>&- &
  local watch=$!
  for forwarded in ALL NONE SLOW=1 "PYTHON=$PYTHON,PYTHONPATH=$ROOT"; do
    job --export="$forwarded" --nodes=2 --gpus-per-node=1 scripts/slurm/slurm_train.sh config/local3.yaml "${SHORT[@]}"
    run ! grep -E 'stranger|RUN_SECRET' job.out
    grep -qE '^hosts .* node1 \(master|^hosts .*node\[1-2\]' job.out
  done
  kill "$watch"
  grep -q 'far_side' ps.out
  run ! grep -qE '\b[0-9a-f]{64}\b' ps.out job.out
}

# bats test_tags=prove
@test "before its time limit a job saves and is requeued" {
  eventually grep -q '^resumed    after step' "$BATS_FILE_TMPDIR/timed.out" || { cat "$BATS_FILE_TMPDIR/timed.out" && false; }
  on login scancel "$TIMED"
  grep -q '^stopped    after step [0-9]*, which is saved (SIGUSR1)$' "$BATS_FILE_TMPDIR/timed.out"
  grep -q "^requeued job $TIMED; it resumes when SLURM starts it again$" "$BATS_FILE_TMPDIR/timed.out"
  eventually has_ended "$TIMED"
}

# bats test_tags=prove,long
@test "a script that does not handle the notice gets a warning, then [time-limit]" {
  echo 'import time; time.sleep(600)' >plain.py
  local code=0 next
  next=$(on login sbatch --parsable --hold --job-name=chain-linked --wrap true)
  CHAIN=linked TRAIN_SCRIPT=plain.py job --nodes=2 --gpus-per-node=1 --time=1 --signal=B:USR1@30 scripts/slurm/slurm_train.sh - || code=$?
  echo "exit code $code: $(<job.out)"
  ((code == 143))
  [[ $(grep -c '^node agent: warning: the script does not handle SIGUSR1, .* \[time-limit\]$' job.out) == 1 ]]
  grep -qx 'FAILED   job (node[1-5]) [0-9]* s after the start  *\[time-limit\]' job.out
  [[ $(tail -n 1 job.out) == "see      TROUBLESHOOTING.md#time-limit" && $(<job.out) != *requeued* ]]
  grep -q '"exit_code": 143' "logs/$JOB/run.json"
  is_pending "$next" && on login scancel "$next"
}

is_shown_twice() {                               # <file>
  (($(grep -c "where the ranks are" "$1") >= 2)) # on a busy machine, a hang report is another
}

@test "the stacks of all ranks: from the login node, and by SIGQUIT to the batch script" {
  start_long --nodes=2 --gpus-per-node=2
  run on login scripts/slurm/slurm_train.sh --stacks "$JOB"
  [[ $status == 0 && $output == *" where the ranks are, innermost call first:"$'\n'"  rank"*": "* ]]
  on login scancel --batch --signal=QUIT "$JOB"
  eventually is_shown_twice job.out
  [[ $(field "$JOB" JobState) == *RUNNING ]]
  on login scancel "$JOB"
  eventually has_ended "$JOB"
}

@test "the job ends with a rank's exit code or signal, and the block names the rank and its host" {
  cat >dies.py <<'PY'
import os, signal, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 3:
    open("died", "w").close()
    sys.exit(7) if sys.argv[1] == "exit" else os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
PY
  local way code took
  for way in exit:7 kill:137; do
    code=0
    TRAIN_SCRIPT=dies.py job scripts/slurm/slurm_train.sh - -- "${way%:*}" || code=$?
    took=$(($(date +%s%3N) - $(date -r died +%s%3N)))
    echo "exit code $code, $took ms after the death: $(<job.out)"
    ((code == ${way#*:} && took < 300000)) # the other ranks sleep for 600 s
    [[ $(grep -c '^FAILED ' job.out) == 1 ]]
    grep -q '^FAILED   rank 3 (local rank 1, node2) ' job.out
    rm job.out died
  done
}

# bats test_tags=prove,long
@test "without srun, a job of several tasks is refused, and a job of one task trains" {
  local wrap="$PYTHON $ROOT/train.py --config config/local3.yaml ${SMALL[*]}"
  run -2 job --nodes=2 --wrap "$wrap"
  grep -q '; put srun before the command \[batch-step\]$' job.out
  run -2 on login salloc -Q --ntasks=2 bash -c "$wrap"
  RUN_ID=one job --wrap "$wrap"
  [[ -d checkpoints/one/step-6 ]]
}

# bats test_tags=prove,long
# The last task of an array has the array's job id; still, only this task must come back.
@test "in an array, USR1 to a task saves, requeues and resumes only that task; TERM only saves" {
  local script=(scripts/slurm/slurm_train.sh config/local3.yaml) array task
  mkdir logs
  array=$(on login sbatch --parsable --array=1-2 --nodes=2 --gpus-per-node=1 "${script[@]}" "${LONG[@]}")
  for task in 1 2; do eventually grep -qs '"step"' "logs/${array}_$task/metrics.jsonl"; done
  [[ $(field "${array}_2" JobId) == JobId=$array ]]
  on login scancel --signal=USR1 --batch "${array}_2"
  eventually grep -q '^resumed    after step' "logs/slurm-$array.out"
  grep -q '^stopped    after step [0-9]*, which is saved (SIGUSR1)$' "logs/slurm-$array.out"
  [[ $(field "${array}_2" Restarts) == Restarts=1 && $(field "${array}_1" Restarts) == Restarts=0 ]]
  on login scancel "$array"
  eventually has_ended "$array"
  for task in 1 2; do
    [[ $(field "${array}_$task" JobState) == JobState=CANCELLED && -d checkpoints/${array}_$task/latest ]]
    [[ $(field "${array}_$task" Restarts) == Restarts=$((task - 1)) ]]
    grep -lE "^run +${array}_$task " logs/slurm-*.out | xargs cat >task.out
    grep -q '^stopped    after step [0-9]*, which is saved (SIGTERM)$' task.out
    grep -q "^resume   RUN_ID=${array}_$task .*sbatch .*--array=$task .*/slurm_train.sh" task.out
  done
  [[ $(find logs -name 'slurm-*.out' | wc -l) == 2 ]]
}

# bats test_tags=prove,long
@test "a heterogeneous job: the script refuses it; through srun it trains, in any order of its hosts" {
  local groups=(--nodelist=node3 --ntasks=1 : --nodelist=node2 --ntasks=1)
  run -2 job "${groups[@]}" scripts/slurm/slurm_train.sh config/local3.yaml "${SHORT[@]}"
  [[ $(<job.out) == *": a heterogeneous job has nodes that differ, "*"; omit the : and the groups after it, "*"[wrong-world]" ]]
  [[ $(wc -l <job.out) == 1 ]]
  RUN_ID=het on login salloc -Q "${groups[@]}" srun --het-group=0,1 "$PYTHON" "$ROOT/train.py" --config config/local3.yaml "${SMALL[@]}"
  [[ -d checkpoints/het/step-6 ]]
}

@test "a wrong config is one line per job, even with one task for each rank" {
  run -2 on login srun -N2 -n4 "$PYTHON" "$ROOT/train.py" --config config/local3.yaml train.max_step=6
  [[ $(grep -vE "$BY_THE_WAY" <<<"$output") == "train.py: command line: train.max_step: unknown key; did you mean train.max_steps? [config-invalid]" ]]
  LAUNCHER=srun run -2 job --ntasks-per-node=2 scripts/slurm/slurm_train.sh config/local3.yaml train.max_step=6
  [[ $(<job.out) == *"did you mean train.max_steps? [config-invalid]" && $(grep -cvE "$BY_THE_WAY" job.out) == 1 ]]
}

# Stops the job in one way, at a random moment after it has started (again).
stop_once() { # <urgent|notice|requeue> <restarts so far>
  if (($2 == 0)); then
    eventually grep -q '^step ' job.out
  else
    eventually has_resumed "$2"
  fi
  sleep "$((RANDOM % 2)).$((RANDOM % 10))"
  case $1 in
    urgent) on login sbatch --partition=urgent --nodes=4 --exclusive --output=/dev/null --wrap "sleep 1" ;;
    requeue) on login scontrol requeue "$JOB" ;;
    notice) on login scancel --signal=USR1 --batch "$JOB" ;; # as before the time limit
  esac
  eventually has_restarts $(($2 + 1))
}

has_resumed() { # <times>
  (($(grep -c '^resumed    after step' job.out) >= $1))
}

has_restarts() { # <number>
  [[ $(field "$JOB" Restarts) == Restarts=$1 ]]
}

# bats test_tags=prove,long
@test "pre-empted, requeued, given notice: a job saves, resumes, and ends with an uninterrupted run's weights" {
  local kinds=(urgent notice requeue) times=${TIMES:-3} number
  LONG=(train.max_steps=$((50 * times)) train.eval_every=0 train.global_batch_size=12 checkpoint.every=0)
  RUN_ID=never SKIP_PREFLIGHT=1 scripts/ssh/launch_singlenode.sh config/local3.yaml 2 "${LONG[@]}"
  RUN_ID=often start_long --nodes=2 --gpus-per-node=1
  for ((number = 0; number < times; number++)); do
    stop_once "${kinds[number < 3 ? number : RANDOM % 3]}" "$number"
  done
  eventually has_ended "$JOB"
  [[ $(field "$JOB" JobState) == JobState=COMPLETED ]]
  [[ $(weights_of often) == "$(weights_of never)" ]]
  grep -q '^stopped    after step [0-9]*, which is saved (SIGUSR1)$' job.out
  echo "# $times stops, $(grep -c '^stopped    after step' job.out) of them saved" >&3
}

# bats test_tags=prove,long
@test "scancel right after a notice ends the job: it saves, and does not come back" {
  start_long --nodes=2 --gpus-per-node=1
  on login scancel --batch --signal=USR1 "$JOB"
  on login scancel "$JOB"
  eventually has_ended "$JOB"
  [[ $(field "$JOB" JobState) == JobState=CANCELLED && $(field "$JOB" Restarts) == Restarts=0 ]]
  grep -q '^resume   ' job.out
  run ! grep -q '^requeued job' job.out
}

# Submits the page's loop as the run broken; sets JOB when it trains.
start_page_loop() { # <the program's arguments...>
  rm -f job.out
  JOB=$(RUN_ID=broken TRAIN_SCRIPT=page.py on login sbatch --parsable --output=job.out --nodes=2 --gpus-per-node=1 \
    scripts/slurm/slurm_train.sh - -- "$@")
  eventually grep -q '^after ' job.out
}

# Kills the newest process of the run broken on a node, which is its rank.
kill_rank_on() { # <node>
  local agent
  agent=$(on "$1" pgrep -o -f 'rdzv-id broken ')
  on "$1" kill -KILL "$(on "$1" pgrep -n -P "$(on "$1" pgrep -P "$agent")")"
}

# bats test_tags=prove,long
@test "the page's loop, stopped and killed at random moments, ends with an unbroken run's weights" {
  local number times=$((${TIMES:-1} * 2))
  local arguments=($((times * 100)) ddp 0)
  make_page_loop
  RUN_ID=whole scripts/launch.sh --nproc-per-node 2 page.py "${arguments[@]}" 0
  for ((number = 0; number < times; number++)); do
    start_page_loop "${arguments[@]}" 0.01
    sleep "0.$((RANDOM % 5))" # the random moment itself
    case $((number % 3)) in
      0) on login scancel "$JOB" ;;
      1) kill_rank_on node2 ;;
      2) on login scancel --signal=KILL "$JOB" ;;
    esac
    eventually has_ended "$JOB"
  done
  start_page_loop "${arguments[@]}" 0
  eventually has_ended "$JOB"
  [[ $(weights_of broken) == "$(weights_of whole)" ]]
  echo "# the loop of docs/your-script.md as a job, stopped or killed $times times: the weights of an unbroken run" >&3
}

# bats test_tags=prove,long
@test "an ordinary script completes every time" {
  local number times=$((${TIMES:-0} ? TIMES * 5 / 2 : 1))
  make_ordinary
  for ((number = 0; number < times; number++)); do
    TRAIN_SCRIPT=ordinary.py job --nodes=2 --gpus-per-node=1 scripts/slurm/slurm_train.sh -
    grep -q '^all 2$' job.out
  done
  echo "# an ordinary script under slurm_train.sh: $times of $times runs completed" >&3
}

have_ended() { # <job...>
  [[ -z $(on login squeue -h -j "$(IFS=, && echo "$*")") ]]
}

# bats test_tags=prove,long
@test "jobs of cluster_train.sh and slurm_train.sh complete at once on the same two nodes (ten of each in make prove)" {
  local most=10 number job jobs=() options=(--parsable --nodes=2 "--nodelist=node[1-2]" --ntasks-per-node=1 --mem=1G)
  [[ -n ${TIMES:-} ]] || most=2
  for ((number = 1; number <= most; number++)); do
    jobs+=("$(on login sbatch "${options[@]}" --output="cluster$number.out" \
      --wrap "srun --ntasks-per-node=1 scripts/cluster_train.sh config/local3.yaml ${SMALL[*]}")")
    jobs+=("$(on login sbatch "${options[@]}" --gpus-per-node=0 --output="slurm$number.out" \
      scripts/slurm/slurm_train.sh config/local3.yaml "${SMALL[@]}")")
  done
  eventually all_run_at_once "${jobs[@]}"
  eventually have_ended "${jobs[@]}"
  tail -n 3 cluster*.out slurm*.out
  for job in "${jobs[@]}"; do
    [[ $(field "$job" JobState) == JobState=COMPLETED && -d checkpoints/$job/step-6 ]]
  done
}

all_run_at_once() { # <job...>
  (($(on login squeue -h -t running -j "$(IFS=, && echo "$*")" | wc -l) == $#))
}

is_refused() { # <job> <output> <job that has the run>
  has_ended "$1" && [[ $(field "$1" ExitCode) == ExitCode=3:0 ]] &&
    grep -q ": run $JOB is live: job $3, process [0-9]* on node[1-5]; .*\[run-is-live\]$" "$2"
}

# bats test_tags=prove,long
@test "a copy of a requeued job, submitted with its run id: the first to start trains, the other ends" {
  local copy
  start_long --nodes=1 --gpus-per-node=1
  copy=$(RUN_ID=$JOB on login sbatch --parsable --output=copy.out --nodes=1 --gpus-per-node=1 \
    scripts/slurm/slurm_train.sh config/local3.yaml "${LONG[@]}")
  eventually is_refused "$copy" copy.out "$JOB" || { cat copy.out && false; }
  on login scancel --batch --signal=USR1 "$JOB"
  eventually grep -qx "requeued job $JOB; it resumes when SLURM starts it again" job.out
  on login scontrol hold "$JOB"
  eventually is_pending "$JOB"
  copy=$(RUN_ID=$JOB on login sbatch --parsable --output=copy.out --nodes=1 --gpus-per-node=1 \
    scripts/slurm/slurm_train.sh config/local3.yaml "${LONG[@]}")
  eventually grep -q '^resumed    after step' copy.out
  eventually grep -q '^step ' copy.out
  on login scontrol release "$JOB"
  eventually is_refused "$JOB" job.out "$copy" || { cat job.out && false; }
  [[ $(field "$copy" JobState) == JobState=RUNNING ]]
  grep -q '"state": "running"' "logs/$JOB/run.json"
  on login scancel "$copy"
  eventually has_ended "$copy"
  grep -q '"exit_code": 75' "logs/$JOB/run.json"
}

is_pending() { # <job>
  [[ $(field "$1" JobState) == JobState=PENDING ]]
}

# bats test_tags=prove
@test "scancel saves and cancels, and nothing is requeued" {
  local number times=$((${TIMES:-2} / 2))
  for ((number = 0; number < times; number++)); do
    start_long --nodes=2
    sleep "$((RANDOM % 2)).$((RANDOM % 10))"
    on login scancel "$JOB"
    eventually has_ended "$JOB"
    grep -q '^stopped    after step [0-9]*, which is saved (SIGTERM)$' job.out
    [[ $(field "$JOB" JobState) == JobState=CANCELLED && $(field "$JOB" Restarts) == Restarts=0 ]]
    [[ $(field "$JOB" ExitCode) == ExitCode=75:0 ]]
    "$PYTHON" -m distributed.checkpoint verify "checkpoints/$JOB"
    rm job.out
  done
  echo "# scancel, $times of $times times: saved, not requeued" >&3
}

# bats test_tags=prove,long
@test "scancel of a script that saves nothing gives code 143, whatever the script's exit code" {
  printf '%s\n' 'import signal, sys, time' 'signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))' \
    'print("ready", flush=True)' 'time.sleep(600)' >one.py
  JOB=$(TRAIN_SCRIPT=one.py on login sbatch --parsable --output=job.out --nodes=2 scripts/slurm/slurm_train.sh -)
  eventually grep -q '^ready' job.out
  on login scancel "$JOB"
  eventually has_ended "$JOB"
  cat job.out
  [[ $(field "$JOB" ExitCode) == ExitCode=143:0 && $(field "$JOB" JobState) == JobState=CANCELLED ]]
  [[ $(tail -n 1 job.out) == "stopped  by SIGTERM: ranks "*" exited with code 1 (code 143); nothing is left running" ]]
  run ! grep -q '^scancel: ' job.out
}

@test "scancel during the preflight gives code 143, and a line says that nothing was started" {
  # shellcheck disable=SC2016 # expanded on the node
  printf '#!/bin/sh\ncase $* in *far_side*) sleep 60 ;; esac\nexec %q "$@"\n' "$PYTHON" >python
  chmod +x python
  JOB=$(PYTHON=$PWD/python on login sbatch --parsable --output=job.out --nodes=2 scripts/slurm/slurm_train.sh)
  eventually on node1 pgrep -f "python .*far_side"
  on login scancel "$JOB"
  eventually has_ended "$JOB"
  cat job.out
  [[ $(field "$JOB" ExitCode) == ExitCode=143:0 && $(field "$JOB" JobState) == JobState=CANCELLED ]]
  grep -q '^stopped  by SIGTERM; nothing was started$' job.out
  run ! grep -qE '^Traceback|\[node-missing\]' job.out
}

# bats test_tags=prove,long
@test "scancel --signal=USR1 without --batch also saves, requeues and resumes" {
  start_long --nodes=2 --gpus-per-node=1
  on login scancel --signal=USR1 "$JOB"
  eventually has_resumed 1
  [[ $(field "$JOB" Restarts) == Restarts=1 ]]
  grep -q '^stopped    after step [0-9]*, which is saved (SIGUSR1)$' job.out
  on login scancel "$JOB"
  eventually has_ended "$JOB"
  [[ $(field "$JOB" ExitCode) == ExitCode=75:0 ]]
}

# bats test_tags=prove
@test "USR2, which submitit asks for, saves and requeues too, sent to the step or to the batch script" {
  start_long --nodes=2 --gpus-per-node=1 --signal=USR2@120
  on login scancel --signal=USR2 "$JOB"
  eventually has_resumed 1
  grep -q '^stopped    after step [0-9]*, which is saved (SIGUSR2)$' job.out
  on login scancel --signal=USR2 --batch "$JOB"
  eventually has_resumed 2
  [[ $(field "$JOB" Restarts) == Restarts=2 && $(<job.out) != *FAILED* ]]
  on login scancel "$JOB"
  eventually has_ended "$JOB"
}

save_and_stop() { # <signal>
  RUN_ID=$1 on login salloc -Q --nodes=2 scripts/slurm/slurm_train.sh config/local3.yaml "${LONG[@]}" >"$1.out" 2>&1 3>&- &
  eventually grep -q '^step ' "$1.out"
  on login pkill "-$1" -o -f "lib/start.py slurm_train "
  end_of $!
  ((CODE == 75))
  grep -q '^stopped  by SIG[A-Z0-9]* after saving a checkpoint ' "$1.out"
  "$PYTHON" -m distributed.checkpoint verify "checkpoints/$1"
}

# bats test_tags=prove,long
@test "Ctrl-C under salloc saves first; a second one kills" {
  save_and_stop INT
  printf '%s\n' 'import signal, time' 'signal.signal(signal.SIGTERM, signal.SIG_IGN)' \
    'print("deaf", flush=True)' 'time.sleep(600)' >deaf.py
  TRAIN_SCRIPT=deaf.py on login salloc -Q --nodes=1 --nodelist=node1 scripts/slurm/slurm_train.sh - >deaf.out 2>&1 3>&- &
  eventually grep -q '^deaf' deaf.out
  on login pkill -INT -o -f "lib/start.py slurm_train "
  sleep 1 # two within 0.3 s count as one
  run ! is_gone_from node1 "deaf.py"
  on login pkill -INT -o -f "lib/start.py slurm_train "
  eventually is_gone_from node1 "deaf.py"
}

# bats test_tags=prove,long
@test "TERM and HUP under salloc, and TERM to the batch script, save first" {
  save_and_stop TERM
  save_and_stop HUP
  start_long --nodes=2
  on login scancel --batch --signal=TERM "$JOB"
  eventually has_ended "$JOB"
  grep -q '^stopped    after step [0-9]*, which is saved (SIGTERM)$' job.out
  [[ $(field "$JOB" ExitCode) == ExitCode=75:0 && $(field "$JOB" Restarts) == Restarts=0 ]]
}

# Types keys into salloc's shell, whose output is in the file "screen".
type_keys() { # <text>
  printf '%b' "$1" >&7
}

@test "under salloc the user keeps the terminal: Ctrl-Z, fg, and typing during a run" {
  cat >waits.py <<'PY'
import os, sys, time
import torch.distributed as dist
def wait_for(file):
    while not os.path.exists(file):
        time.sleep(0.05)
dist.init_process_group("gloo")
print("ready", flush=True)
wait_for("go")
print("x" * 999_999, flush=True)  # more than a pipe holds, and nothing reads it
dist.barrier()
open("passed", "w").close()
wait_for("end")
sys.exit(7 * dist.get_rank())
PY
  mkfifo keys
  on login script -fqc "salloc -Q --nodes=2 --nodelist=node[1-2] bash --norc -i" screen <keys &>/dev/null 3>&- &
  exec 7>keys
  eventually grep -q "bash-.*#" screen
  type_keys 'TRAIN_SCRIPT=waits.py scripts/slurm/slurm_train.sh -\n'
  eventually grep -q '^ready' screen
  type_keys '\032' # Ctrl-Z
  eventually grep -q 'Stopped .*slurm_train.sh' screen
  touch go
  eventually test -e passed # the ranks continue
  # shellcheck disable=SC2016 # expanded by salloc's shell
  type_keys 'echo at-the-shell-$((40 + 2))\n'
  eventually grep -q 'at-the-shell-42' screen
  type_keys 'fg\necho code-$?\n'
  eventually grep -q 'xxx' screen   # it continues, and shows the output that came in the meantime
  run ! grep -q 'code-[0-9]' screen # the shell has not received this yet
  touch end
  eventually grep -q 'code-7' screen
  type_keys 'exit\n'
  wait $!
  exec 7>&-
  grep -q 'FAILED.* rank 1 (local rank 0, node2) .*rank-error' screen
}

# bats test_tags=prove,long
@test "a notice before the first step also requeues, and resume=never applies to the first start only" {
  JOB=$(on login sbatch --parsable --output=job.out --nodes=1 scripts/slurm/slurm_train.sh config/local3.yaml "${LONG[@]}" resume=never)
  eventually grep -q '^logs ' job.out # the agent is about to start
  on login scancel --batch --signal=USR1 "$JOB"
  eventually has_restarts 1
  eventually has_resumed 1
  on login scancel "$JOB"
  eventually has_ended "$JOB"
  tail job.out
  grep -q "^resume   RUN_ID=$JOB .*sbatch --nodes=1 --gpus-per-node=2 --partition=batch scripts/slurm/slurm_train.sh config" job.out
}

# bats test_tags=prove,long
@test "a time limit that is shorter than the notice: each requeue says so; filters of squeue change nothing" {
  export SQUEUE_STATES=PENDING SQUEUE_PARTITION=urgent SINFO_PARTITION=none SRUN_OPTS=--comment=site
  JOB=$(on login sbatch --parsable --output=job.out --nodes=2 --gpus-per-node=1 --time=2 \
    scripts/slurm/slurm_train.sh config/local3.yaml "${LONG[@]}")
  eventually has_resumed 1
  unset "${!SQUEUE@}"
  on login scancel "$JOB"
  grep -q '^slurm_train.sh: warning: the notice comes at once, .* 00:02:00; ask for more --time, .*\[time-limit\]$' job.out
  eventually grep -q "^resume   .* SRUN_OPTS=--comment=site " job.out
  eventually has_ended "$JOB"
}

@test "a notice that comes before srun has started the ranks reaches them" {
  cat >prolog <<'SH'
#!/bin/bash
[[ -e noticed ]] || { touch noticed && scancel --batch --signal=USR1 "$SLURM_JOB_ID" && sleep 1; }
SH
  chmod +x prolog
  export SLURM_PROLOG=$PWD/prolog # which srun runs before it starts the tasks
  JOB=$(on login sbatch --parsable --output=job.out --nodes=1 scripts/slurm/slurm_train.sh config/local3.yaml "${LONG[@]}")
  eventually has_restarts 1
  on login scancel "$JOB"
  eventually has_ended "$JOB"
}

# bats test_tags=prove,long
@test "a notice during the preflight is kept, and handled before the ranks start" {
  mkdir fake
  cat >fake/srun <<SH
#!/bin/bash
[[ "\$*" != *far_side* || -e noticed ]] || { touch noticed && kill -USR1 "\$PPID"; }
exec $(on login bash -c 'type -P srun') "\$@"
SH
  chmod +x fake/srun
  JOB=$(PATH=$PWD/fake:$PATH on login sbatch --parsable --output=job.out --nodes=2 scripts/slurm/slurm_train.sh config/local3.yaml "${SMALL[@]}")
  eventually has_ended "$JOB"
  cat job.out
  [[ $(field "$JOB" Restarts) == Restarts=1 && $(field "$JOB" ExitCode) == ExitCode=0:0 ]]
  [[ $(grep -c '^run ' job.out) == 2 && $(grep -c '^model ' job.out) == 1 ]]
}

# bats test_tags=prove,long
@test "a lost node: its jobs complete on other nodes, and a start that was suspended saves nothing" {
  local many=(train.max_steps=600 "${SMALL[@]:1}" checkpoint.every=50) two lost other
  RUN_ID=never SKIP_PREFLIGHT=1 scripts/ssh/launch_singlenode.sh config/local3.yaml 2 "${many[@]}"
  LONG+=(checkpoint.every=50)
  GRACE=5 start_long --nodes=1
  lost=$(field "$JOB" BatchHost)
  lost=${lost#*=}
  two=$(RUN_ID=two NPROC_PER_NODE=1 SILENCE_SECONDS=10 on login \
    sbatch --parsable --output=two.out --nodes=2 --exclusive \
    scripts/slurm/slurm_train.sh config/local3.yaml "${many[@]}")
  eventually test -e checkpoints/two/latest || { cat two.out && false; }
  other=$(on login scontrol show hostnames "$(on login squeue -h -j "$two" -o %N)" | tail -n 1)
  "$CLUSTER" cut "$lost"
  on "$lost" bash -c 'kill -STOP -1' # a virtual machine that is suspended; otherwise it would stop
  "$CLUSTER" cut "$other"
  # Unless SLURM requeues the job within 8 s, it ends. SLURM itself noticed the loss 3 s too late.
  eventually grep -q "^FAILED   node agent 1 ($other) .*\[link-lost\]$" two.out
  on login scontrol update nodename="$other" state=down reason=lost
  eventually grep -q '^resumed    after step' job.out
  on "$lost" bash -c 'kill -CONT -1'
  eventually is_gone_from "$lost" "rdzv-id $JOB .*train.py"
  grep -q "step [0-9]* was not saved: run $JOB was restarted on node[1-5], so .*\[node-lost\]" job.out
  eventually has_ended "$two"
  cat two.out
  [[ $(field "$two" JobState) == JobState=COMPLETED && $(field "$two" Restarts) == Restarts=1 ]]
  grep -q '^resumed    after step' two.out
  [[ $(weights_of two) == "$(weights_of never)" ]]
  "$CLUSTER" restore "$lost"
  "$CLUSTER" restore "$other"
  on login scancel "$JOB"
  eventually has_ended "$JOB"
  # Only the start that was cut off may report a failure; the start that replaced it reports none.
  grep -q '^stopped  by SIG[A-Z]* after saving a checkpoint (code 75)' job.out || { cat job.out && false; }
  if grep '^FAILED' job.out | grep -v "^FAILED   rank [01] (local rank [01], $lost) "; then cat job.out && false; fi
  "$PYTHON" -m distributed.checkpoint verify "checkpoints/$JOB"
  eventually node_state_is "$lost" idle
  eventually node_state_is "$other" idle
}

# Sets how long SLURM waits for a lost node: 300 s by default, 10 s on this cluster.
set_slurmd_timeout() { # <seconds>
  sed -i "s/^SlurmdTimeout=.*/SlurmdTimeout=$1/" "$CLUSTER_DIR/etc/slurm.conf"
  on login scontrol reconfigure
}

is_not_running() { # <job>
  [[ $(field "$1" JobState) != JobState=RUNNING ]]
}

# bats test_tags=prove,long
@test "a job that has lost a node ends with the run's code, whether or not the node returns" {
  local away cut_at ended_s
  set_slurmd_timeout 300
  export SILENCE_SECONDS=10
  for away in 14 40; do
    start_long --nodes=2 --nodelist=node[1-2] --gpus-per-node=1
    "$CLUSTER" cut node2
    cut_at=$SECONDS
    (sleep "$away" && on login ip link set node2 up) 3>&- &
    eventually is_not_running "$JOB"
    ended_s=$((SECONDS - cut_at))
    wait $!
    cat job.out
    ((ended_s <= 28)) # 13 s until the loss is known, then 15 s until the job ends
    [[ $(field "$JOB" ExitCode) == ExitCode=137:0 ]]
    [[ $(grep -c '^FAILED ' job.out) == 1 ]]
    grep -q '^FAILED   node agent 1 (node2) .*\[link-lost\]$' job.out
    [[ $(tail -n 1 job.out) == "see      TROUBLESHOOTING.md#link-lost" ]]
    rm job.out
    on login scontrol update nodename=node2 state=down reason=test                   # SLURM alone takes minutes
    on login scontrol update nodename=node2 state=resume || node_state_is node2 idle # its slurmd was faster
  done
  set_slurmd_timeout 10
  eventually node_state_is node2 idle
}

# Writes submit.sh, which submits jobs of two nodes with one rank each: our batch script, two of the
# user's own, one task per rank, and a launch under salloc. The output of each is in inner-<job>.out.
make_inner_jobs() {
  cat >ordinary.py <<'PY'
from torch_launch_kit.distributed import torch as helper
print(f"all {helper.init_distributed().world_size}", flush=True)
PY
  printf '#!/bin/bash\nexec scripts/launch.sh --hosts job ordinary.py\n' >own.sbatch
  printf '#!/bin/bash\nTRAIN_SCRIPT=ordinary.py scripts/run_ddp.sh -c -\n' >ddp.sbatch
  cat >submit.sh <<'SH'
size=(--nodes=2 --gpus-per-node=1)
options=(--nodes=2 --mem=50 --output=inner-%j.out)
sbatch "${size[@]}" "${options[@]}" own.sbatch
sbatch "${size[@]}" "${options[@]}" ddp.sbatch
sbatch --gpus-per-node=1 "${options[@]}" scripts/slurm/slurm_train.sh -
LAUNCHER=srun sbatch --gpus-per-node=1 "${options[@]}" scripts/slurm/slurm_train.sh -
salloc -Q "${size[@]}" bash -c 'exec scripts/launch.sh --hosts job ordinary.py &>inner-$SLURM_JOB_ID.out'
touch submitted
SH
  export TRAIN_SCRIPT=ordinary.py
}

have_trained_alone() { # <jobs>
  local file job files
  eventually test -e submitted
  files=(inner-*.out)
  ((${#files[@]} == $1)) || return
  for file in "${files[@]}"; do
    job=${file//[!0-9]/}
    eventually has_ended "$job"
    cat "$file"
    grep -q '^all 2$' "$file" && run ! grep -q '^all [^2]' "$file" && grep -q "^run        $job$" "$file" || return
  done
}

# bats test_tags=prove
@test "a job submitted in the shell of a step trains on its own nodes, as its own run" {
  make_inner_jobs
  on login srun --nodes=1 --ntasks=1 --gpus-per-node=1 --mem-per-cpu=10 bash submit.sh
  have_trained_alone 5
}

# bats test_tags=prove,long
@test "a job submitted by a task of an array has its own ranks, run and GPUs" {
  make_inner_jobs
  sed -i 's/^size=.*/size=(--nodes=2)/' submit.sh
  on login sbatch --array=3 --ntasks-per-node=4 --gpus-per-node=2 --cpus-per-task=2 --output=outer.out --wrap "bash submit.sh"
  have_trained_alone 5
}

@test "submitted from any folder, by its path, with spaces in both" {
  mkdir "a b" "else where"
  ln -s -- "$ROOT/scripts" "a b"
  cp -- "$ROOT/config/"*.yaml "a b"
  cd "else where"
  RUN_ID=path job --nodes=1 "../a b/scripts/slurm/slurm_train.sh" "../a b/local3.yaml" "${SMALL[@]}"
  [[ -d checkpoints/path/step-6 ]]
  grep -q "^resume     RUN_ID=path .*sbatch --nodes=1 --gpus-per-node=2 --partition=batch $ROOT/scripts/slurm/slurm_train.sh '../a b/local3.yaml' " job.out
  run on login "../a b/scripts/submit_with_config.sh" config="../a b/local3.yaml" num_gpus_train=2 --dry-run
  [[ $output == *" $ROOT/scripts/slurm/slurm_train_single_node.sh '../a b/local3.yaml'"* ]]
  echo 'import sys; print("got", sys.argv[1:])' >own.py
  job --nodes=1 "../a b/scripts/launch.sh" --hosts job --nproc-per-node 1 own.py x.sh "a b"
  grep -q "got \['x.sh', 'a b'\]" job.out
}

@test "a copy of the script that cannot find the project is refused in one line" {
  mkdir elsewhere
  local name
  for name in slurm_train slurm_train_single_node; do
    cp -- "$ROOT/scripts/slurm/$name.sh" elsewhere/mine.sh
    (cd elsewhere && run -3 job --nodes=1 mine.sh)
    [[ $(<elsewhere/job.out) == "$name.sh: this copy cannot find scripts/lib; submit it from the project's folder or the one containing launch-kit/ [env-missing]" ]]
    rm elsewhere/job.out
    run -3 elsewhere/mine.sh # outside any job
    [[ $output == "$name.sh: this copy cannot find scripts/lib; "* && ${#lines[@]} == 1 ]]
    RUN_ID=$name job --nodes=1 elsewhere/mine.sh config/local3.yaml --dry-run # from the project's folder
  done
}

# bats test_tags=prove,long
@test "200 kB of arguments arrive" {
  echo 'import sys; print("got", len(sys.argv))' >many.py
  # shellcheck disable=SC2046 # many words
  TRAIN_SCRIPT=many.py run on login salloc -Q --nodes=2 scripts/slurm/slurm_train.sh - -- $(seq 100000 130000)
  [[ $status == 0 && $output == *"got 30002"* ]]
}

@test "the preflight compares the nodes of a job, and checks what they share" {
  local node own=/dev/shm/own # each host has a separate one
  for node in login node1 node2; do
    on "$node" mkdir -p "$own"
    on "$node" tee "$own/my.yaml" <<<"train: {max_steps: 1, batch_size: 1}"
  done
  on node2 tee -a "$own/my.yaml" <<<"seed: 2"
  MASTER_PORT=4321 run -3 on login salloc -Q --nodes=2 --nodelist=node[1-2] --gpus-per-node=1 \
    scripts/slurm/slurm_train.sh "$own/my.yaml" checkpoint.dir="$own/checkpoints"
  [[ $(grep -vE "$BY_THE_WAY" <<<"$output") == "slurm_train.sh: node2: my.yaml is "*"; make them the same [code-mismatch]"$'\n'"slurm_train.sh: node2: '$own' is not the same folder as on node rank 0; "*" [dir-not-shared]" ]]
  "$CLUSTER" drop node1 4321
  MASTER_PORT=4321 run -3 on login salloc -Q --nodes=2 --nodelist=node[1-2] --gpus-per-node=1 \
    scripts/slurm/slurm_train.sh config/local3.yaml
  "$CLUSTER" restore node1
  [[ $output == *"slurm_train.sh: node2: cannot reach node1:4321 (no answer in 3 s); "*" [port-blocked]" && ! -e logs ]]
  for node in login node1; do on "$node" ln -s "$PYTHON" "$own/python"; done
  PYTHON=$own/python TRAIN_SCRIPT=own.py run -3 on login salloc -Q --nodes=2 --nodelist=node[1-2] scripts/slurm/slurm_train.sh -
  [[ $output == *"No such file or directory"*"; make $PWD, $ROOT and $own/python available there [env-missing]" ]]
}

# bats test_tags=prove,long
@test "a node whose first step starts 9 s late takes part in the run, also node rank 0" {
  local late
  # shellcheck disable=SC2016 # expanded on the node
  printf '#!/bin/sh\ncase $*$(uname -n) in *far_side*$LATE) mkdir "$MARK" && sleep 9 ;; esac\nexec %q "$@"\n' "$PYTHON" >python
  chmod +x python
  for late in node1 node2; do
    LATE=$late MARK=$PWD/$late PYTHON=$PWD/python run on login salloc -Q --nodes=2 --nodelist=node[1-2] scripts/slurm/slurm_train.sh config/local3.yaml "${SMALL[@]}"
    echo "$output"
    [[ $status == 0 && -d $late && $output == *"checks on 2 nodes: ok"* ]]
  done
}

# bats test_tags=prove,long
@test "a run that a job of higher priority pre-empts saves, waits and resumes" {
  local urgent
  start_long --nodes=2 --nodelist=node[1-2] --gpus-per-node=1
  urgent=$(on login sbatch --parsable --partition=urgent --nodes=2 --nodelist=node[1-2] --exclusive \
    --output=/dev/null --wrap "until test -e over; do sleep 0.1; done")
  eventually is_running "$urgent" 0
  [[ $(field "$JOB" JobState) == JobState=PENDING ]]
  grep -q '^stopped    after step [0-9]*, which is saved (SIGTERM)$' job.out
  "$PYTHON" -m distributed.checkpoint verify "checkpoints/$JOB"
  touch over
  eventually has_resumed 1
  [[ $(field "$JOB" Restarts) == Restarts=1 ]]
  on login scancel "$JOB"
  eventually has_ended "$JOB"
  run ! grep -q '^FAILED ' job.out
}

# Runs a job that takes two nodes of a long job with a grace time, until free_nodes().
preempt() { # <long job's sbatch options...>
  start_long --nodes=2 --nodelist=node[1-2] --gpus-per-node=1 "$@"
  take_nodes
}

take_nodes() { # sets URGENT
  URGENT=$(on login sbatch --parsable --partition=urgent --nodes=2 --nodelist=node[1-2] --exclusive \
    --output=/dev/null --wrap "until test -e over; do sleep 0.1; done")
}

free_nodes() {
  touch over
  eventually has_ended "$URGENT"
  rm over
}

# bats test_tags=prove
@test "preempted with a grace time, a job saves and is requeued at once, as is a task of an array" {
  local options
  for options in --array=3 --signal=B:USR1@120; do
    preempt --partition=low "$options"
    eventually grep -q "^requeued job $JOB.*; it resumes when SLURM starts it again$" job.out
    grep -q '^stopped  by SIGTERM after saving a checkpoint ' job.out
    free_nodes
    eventually has_resumed 1
    [[ $(field "$JOB" Restarts) == Restarts=1 ]]
    on login scancel "$JOB"
    eventually has_ended "$JOB"
    [[ $(field "$JOB" JobState) == JobState=CANCELLED && $(field "$JOB" Restarts) == Restarts=1 ]]
    rm job.out
  done
}

# bats test_tags=prove,long
@test "preempted with PreemptMode=CANCEL, a job saves and ends with its resume line, with and without a grace time" {
  local grace
  for grace in 30 0; do
    on login scontrol update partitionname=cheap gracetime="$grace"
    preempt --partition=cheap
    eventually has_ended "$JOB"
    free_nodes
    cat job.out
    [[ $(field "$JOB" ExitCode) == ExitCode=75:0 && $(<job.out) != *requeued* ]]
    grep "^resume   RUN_ID=$JOB " job.out
    rm job.out
  done
  on login scontrol update partitionname=cheap gracetime=30
}

# Preempts a job of two nodes in a part of its start, for which node2 waits once.
preempt_early() { # <far_side|torch: what node2 starts late> <partition>
  rm -rf waits job.out early
  mkdir early
  cat >early/sitecustomize.py <<PY
import builtins, os, time
at_once = builtins.__import__
def late(name, *rest, **more):
    if name == "$1" and os.uname().nodename == "node2":
        builtins.__import__ = at_once
        if not os.path.exists("$PWD/waits"):
            os.mkdir("$PWD/waits")
            time.sleep(600)
    return at_once(name, *rest, **more)
builtins.__import__ = late
PY
  cat >python <<SH
#!/bin/bash
[[ \$(uname -n)\$* != node2*.$1* ]] || ! mkdir $PWD/waits || sleep 600
export PYTHONPATH=$PWD/early:\$PYTHONPATH
exec $PYTHON "\$@"
SH
  chmod +x python
  JOB=$(PYTHON=$PWD/python on login sbatch --parsable --output=job.out --partition="$2" --nodes=2 \
    --nodelist=node[1-2] --gpus-per-node=1 scripts/slurm/slurm_train.sh config/local3.yaml "${LONG[@]}")
  eventually test -e waits
  take_nodes
}

# bats test_tags=prove,long
@test "preempted in the preflight or while its nodes meet, a job is requeued; with PreemptMode=CANCEL, it ends" {
  local part
  for part in far_side torch; do
    preempt_early "$part" low
    eventually grep -q "^requeued job $JOB; it resumes when SLURM starts it again$" job.out
    free_nodes
    eventually grep -q '^step ' job.out
    cat job.out
    [[ $(field "$JOB" Restarts) == Restarts=1 ]]
    run ! grep -E '^FAILED|^Traceback|\[node-missing\]' job.out
    on login scancel "$JOB"
    eventually has_ended "$JOB"
  done
  preempt_early far_side cheap
  eventually has_ended "$JOB"
  free_nodes
  cat job.out
  [[ $(field "$JOB" ExitCode) == ExitCode=143:0 && $(field "$JOB" Restarts) == Restarts=0 ]]
  [[ $(tail -n 1 job.out) == "stopped  by SIGTERM; nothing was started" ]]
}

# bats test_tags=prove,long
@test "preempted while it saves for longer than the grace time, a job is requeued by SLURM" {
  printf '%s\n' 'import signal, time' 'signal.signal(signal.SIGTERM, lambda *_: print("saving", flush=True))' \
    'print("step 1", flush=True)' 'while True: time.sleep(1)' >slow.py
  JOB=$(GRACE=600 TRAIN_SCRIPT=slow.py on login sbatch --parsable --output=job.out --partition=low --nodes=2 \
    --nodelist=node[1-2] --gpus-per-node=1 scripts/slurm/slurm_train.sh -)
  eventually grep -q '^step 1' job.out
  on login scontrol update partitionname=low gracetime=30
  on login sbatch --partition=urgent --nodes=2 --nodelist=node[1-2] --exclusive --output=/dev/null --wrap "sleep 1"
  eventually has_restarts 1
  on login scontrol update partitionname=low gracetime=120
  grep -q '^saving' job.out
  run ! grep -q '^requeued job' job.out
  on login scancel "$JOB"
  eventually has_ended "$JOB"
}

# bats test_tags=prove,long
@test "a nested srun --overlap looks at the job's nodes, or starts a separate run; the job's run continues" {
  local looked
  start_long --nodes=2 --gpus-per-node=1
  looked=$(on login srun --jobid="$JOB" --overlap --nodes=2 --ntasks-per-node=1 hostname | sort -u)
  [[ $(wc -l <<<"$looked") == 2 && $looked == node*node* ]]
  on login srun --jobid="$JOB" --overlap --nodes=1 --ntasks=1 scripts/run_ddp.sh -c config/local3.yaml "${SMALL[@]}" &>nested.out
  cat nested.out
  grep -q "^run        ${JOB}[.][0-9]" nested.out
  grep -q '^done       step 6 ' nested.out
  [[ $(field "$JOB" JobState) == JobState=RUNNING ]]
  on login scancel --batch --signal=TERM "$JOB"
  eventually has_ended "$JOB"
  [[ $(field "$JOB" ExitCode) == ExitCode=75:0 ]]
}

# bats test_tags=prove,long
@test "the module of the user's task is compared between nodes, in a job and by hand" {
  local node own=/dev/shm/task # each host has a separate one
  local differs="mine.py is '*' on node rank 0 (node1) and '*' on node rank 1 (node2); make them the same [[]code-mismatch]"
  for node in login node1 node2; do
    on "$node" mkdir -p "$own"
    on "$node" tee "$own/my.yaml" <<<"{task: 'mine:Mine', train: {max_steps: 1, batch_size: 1}}"
    on "$node" tee "$own/mine.py" <<<"class Mine: ..."
  done
  on node2 tee -a "$own/mine.py" <<<"# newer"
  run -3 on login salloc -Q --nodes=2 --nodelist=node[1-2] --gpus-per-node=1 scripts/slurm/slurm_train.sh "$own/my.yaml"
  # shellcheck disable=SC2053 # a pattern
  [[ $(grep -v '^srun: ' <<<"$output") == "slurm_train.sh: node2: "$differs ]]
  on node2 scripts/ssh/launch_torchrun_multinode.sh "$own/my.yaml" 1 2 1 node1 4330 &>second.out 3>&- &
  run -3 on node1 scripts/ssh/launch_torchrun_multinode.sh "$own/my.yaml" 1 2 0 node1 4330
  end_of $!
  echo "$output" "$(<second.out)"
  # shellcheck disable=SC2053
  [[ $CODE == 3 && $output == *${differs%;*}*"code-mismatch]"* ]]
}

@test "without logs/ SLURM drops a job before it starts, as the guide says" {
  JOB=$(on login sbatch --parsable scripts/slurm/slurm_train.sh)
  eventually has_ended "$JOB"
  [[ $(on login scontrol show job "$JOB") == *"JobState=FAILED Reason=JobLaunchFailure"*"ExitCode=0:53"* ]]
  [[ ! -e logs ]]
}

@test "run_ddp.sh in an allocation takes all of its nodes" {
  RUN_ID=ddp on login salloc -Q --nodes=2 --gres=gpu:2 scripts/run_ddp.sh -c config/local3.yaml "${SMALL[@]}"
  grep -q '"world_size": 4' logs/ddp/run.json
}

# bats test_tags=prove,long
@test "two launches in one allocation are two runs; a requeued job resumes each" {
  local words="${SHORT[*]}"
  cat >two.sh <<SH
#!/bin/bash
scripts/run_ddp.sh -c config/local3.yaml $words
scripts/run_ddp.sh -c config/local3.yaml $words seed=5
srun --ntasks=2 --ntasks-per-node=1 scripts/cluster_train.sh config/local3.yaml $words seed=6
[[ \$SLURM_RESTART_COUNT == 1 ]] || sleep 600
SH
  JOB=$(on login sbatch --parsable --requeue --output=job.out --nodes=2 --gpus-per-node=1 two.sh)
  eventually test -d "checkpoints/$JOB.2/step-6" # of step 2
  grep -q "^run        $JOB.1 " job.out
  run ! grep -q '^resumed ' job.out
  [[ $(weights_of "$JOB") != "$(weights_of "$JOB.1")" ]]
  on login scontrol requeue "$JOB"
  eventually has_ended "$JOB"
  cat job.out
  [[ $(grep -c '^resumed    after step 6$' job.out) == 3 ]]
  run ! grep -q '(was ' job.out
}

# bats test_tags=prove
@test "a node that refuses a launch under srun ends the step, and the others do not wait for it" {
  local rank code began=$SECONDS
  for rank in 0 1; do
    code=0
    on login srun --nodes=2 --ntasks=2 scripts/cluster_train.sh config/local3.yaml 2 "$rank" node1 &>refused.out || code=$?
    cat refused.out
    ((code > 0 && SECONDS - began < 240)) # node rank 0 would wait for 300 s
    grep -q "the argument NODE_RANK is '$rank' but srun's SLURM_NODEID is $((1 - rank)); .*\[wrong-world\]$" refused.out
  done
  on login srun --nodes=2 --ntasks=2 scripts/cluster_train.sh config/local3.yaml --dry-run
}

# bats test_tags=prove,long
@test "cluster_train.sh under srun checks each node separately, even if port 29500 is in use" {
  "$CLUSTER" run node1 "$PYTHON" -c 'import socket, time; s = socket.create_server(("", 29500)); time.sleep(60)' 3>&- &
  local taken=$!
  run on login salloc -Q --nodes=2 --nodelist=node[1-2] srun --ntasks-per-node=1 scripts/cluster_train.sh config/local3.yaml "${SMALL[@]}"
  kill "$taken"
  echo "$output"
  [[ $status == 0 && $(grep -c '^health     this node alone, 1 process: ok in ' <<<"$output") == 2 ]]
}

@test "submit_with_config.sh: one node if the GPUs fit, otherwise several, all alike" {
  local words
  while IFS='|' read -r gpus words; do
    run --separate-stderr on login scripts/submit_with_config.sh config=config/local3.yaml \
      num_gpus_train="$gpus" --dry-run train.global_batch_size=48 time=10
    # shellcheck disable=SC2154 # run sets it
    [[ $status == 0 && $stderr == *"sbatch --parsable --time=10 $words config/local3.yaml train.global_batch_size=48" ]]
  done <<'TABLE'
4|--nodes=1 --gpus-per-node=4 scripts/slurm/slurm_train_single_node.sh
16|--nodes=2 --gpus-per-node=8 --exclusive scripts/slurm/slurm_train.sh
TABLE
  [[ -z $(on login squeue -h) ]]
}

@test "submit_with_config.sh: a list of nodes is ignored if one node is enough" {
  run on login scripts/submit_with_config.sh config=config/local3.yaml num_gpus_train=4 nodelist=node1,node2 --dry-run
  [[ $output == *"warning: 4 GPUs fit on one node; nodelist=node1,node2 is ignored"* ]]
  [[ $output != *--nodelist* ]]
  run on login scripts/submit_with_config.sh config=config/local3.yaml num_gpus_train=4 nodelist=node2 --dry-run
  [[ $output == *" --nodelist=node2 "* ]]
}

@test "submit_with_config.sh: bad input is one line, and nothing is queued" {
  local cause arguments
  while IFS='|' read -r arguments cause; do
    read -ra arguments <<<"$arguments"
    run -2 on login scripts/submit_with_config.sh "${arguments[@]}"
    [[ ${#lines[@]} == 1 && $output == *"$cause"* ]]
  done <<'TABLE'
config=config/local3.yaml|no num_gpus_train; usage: scripts/submit_with_config.sh config=FILE
config=config/local3.yaml num_gpus_train=2 train.max_step=3|train.max_step: unknown key; did you mean train.max_steps?
TABLE
  while IFS='|' read -r arguments cause; do
    read -ra arguments <<<"$arguments"
    run -3 on login scripts/submit_with_config.sh config=config/local3.yaml train.global_batch_size=704 "${arguments[@]}"
    [[ $output == *"$cause"*"; sinfo shows what is available" ]]
  done <<'TABLE'
num_gpus_train=64 prepare=prepare.sh|8 nodes x 8 GPUs: allocation failure: Requested node configuration is not available
num_gpus_train=11|11 nodes x 1 GPUs: allocation failure: Requested node configuration is not available
num_gpus_train=2 nodelist=nope|1 node x 2 GPUs: allocation failure: Invalid node name specified
TABLE
  run -2 on login scripts/submit_with_config.sh config=config/local3.yaml num_gpus_train=2 nodelist='node[1-' --dry-run
  [[ $output == *"host list 'node[1-'"* && ${#lines[@]} == 1 ]]
  [[ -z $(on login squeue -h) ]]
}

@test "submit_with_config.sh: a SLURM that does not answer is named; arguments after -- arrive, even empty ones" {
  touch empty.conf
  run -3 on login env SLURM_CONF="$PWD/empty.conf" scripts/submit_with_config.sh config=config/local3.yaml num_gpus_train=2 --dry-run
  [[ ${lines[-1]} == *"sinfo failed, see above; submit where sinfo works [env-missing]" ]]
  TRAIN_SCRIPT=own.py run on login scripts/submit_with_config.sh config=- num_gpus_train=2 --dry-run -- '' 'a b'
  [[ $output == *" - -- '' 'a b'" ]]
}

@test "submit_with_config.sh: an sbatch that prints a banner submits a whole chain" {
  local jobs
  mkdir site
  printf '#!/bin/bash\necho ------\necho "Welcome to cluster 9"\nexec %s "$@"\n' "$(on login bash -c "type -P sbatch")" >site/sbatch
  chmod +x site/sbatch
  # shellcheck disable=SC2016 # expanded on login
  run --separate-stderr on login bash -c 'PATH=$PWD/site:$PATH; exec "$@"' "" scripts/submit_with_config.sh \
    config=config/local3.yaml num_gpus_train=2 chain=2 --begin=now+1hour "${SMALL[@]}"
  [[ $status == 0 ]]
  mapfile -t jobs < <(sed -n 's/^job  *\([0-9]*\) .*/\1/p' <<<"$stderr")
  [[ ${#jobs[@]} == 2 && $(field "${jobs[1]}" Dependency) == "Dependency=afterany:${jobs[0]}"* ]]
  on login scancel "${jobs[@]}"
}

# bats test_tags=prove,long
@test "submit_with_config.sh: the preparation job runs before the training; --wait returns the training's code" {
  # shellcheck disable=SC2016 # expanded in the job
  printf '#!/bin/bash\necho "$SLURM_GPUS_ON_NODE GPU for $1" >prepared\n' >prepare.sh
  printf '#!/bin/bash\nexit 5\n' >fails.sh
  echo 'import sys; sys.exit(7)' >seven.py # all at once: SLURM checks for ended jobs every 10 s
  TRAIN_SCRIPT=seven.py on login scripts/submit_with_config.sh config=- num_gpus_train=1 --wait &>seven.out 3>&- &
  local seven=$! never
  on login scripts/submit_with_config.sh config=config/local3.yaml num_gpus=1 prepare=fails.sh num_gpus_train=2 --wait &>never.out 3>&- &
  never=$!
  run --separate-stderr on login scripts/submit_with_config.sh config=config/local3.yaml num_gpus=1 \
    prepare=prepare.sh num_gpus_train=2 --wait "${SMALL[@]}"
  [[ $status == 0 && $output == *"done       step 6 "* ]]
  [[ $(<prepared) == "1 GPU for config/local3.yaml" ]]
  end_of "$seven"
  ((CODE == 7))
  end_of "$never"
  cat never.out
  ((CODE == 1))
  grep -qE '^submit_with_config.sh: job [0-9]+ did not start: job [0-9]+ failed; see logs/slurm-[0-9]+.out$' never.out
}

# bats test_tags=prove,long
@test "node names that only SLURM knows, as in some clouds: the nodes meet at an address" {
  local hosts=$CLUSTER_DIR/etc/hosts code=0
  cp "$hosts" hosts
  grep -v ' node' hosts >"$hosts" # in place: the hosts have mounted this file
  job --nodes=2 --gpus-per-node=1 scripts/slurm/slurm_train.sh config/local3.yaml "${SMALL[@]}" || code=$?
  cat hosts >"$hosts"
  cat job.out
  ((code == 0))
  grep -qE '^hosts      10\.0\.0\.[0-9]+:' job.out
}

nothing_queued() {
  [[ -z $(on login squeue -h) ]]
}

# bats test_tags=prove,long
@test "a chain: each job resumes the previous job's run, and the job that completes it cancels the rest" {
  local jobs steps=400 words=(config=config/local3.yaml num_gpus_train=2 "${SMALL[@]}")
  RUN_ID=one SKIP_PREFLIGHT=1 scripts/ssh/launch_singlenode.sh config/local3.yaml 2 "${SMALL[@]}" train.max_steps=$steps
  RUN_ID=linked on login scripts/submit_with_config.sh "${words[@]}" train.max_steps=$steps chain=4 &>chain.out
  mapfile -t jobs < <(sed -n 's/^job  *\([0-9]*\) .*/\1/p' chain.out)
  eventually grep -q '^step ' "logs/slurm-${jobs[0]}.out"
  on login scancel --signal=USR1 --batch "${jobs[0]}"
  eventually has_ended "${jobs[1]}"
  [[ $(field "${jobs[0]}" ExitCode) == ExitCode=75:0 && $(field "${jobs[1]}" ExitCode) == ExitCode=0:0 ]]
  grep -q '^resumed    after step ' "logs/slurm-${jobs[1]}.out"
  eventually has_ended "${jobs[3]}"
  [[ $(field "${jobs[2]}" JobState) == JobState=CANCELLED && $(field "${jobs[3]}" JobState) == JobState=CANCELLED ]]
  [[ ! -e logs/slurm-${jobs[2]}.out && ! -e logs/slurm-${jobs[3]}.out ]]
  [[ $(weights_of linked) == "$(weights_of one)" ]]
}

# bats test_tags=prove,long
@test "a chain of jobs, each ended by its time limit, ends with the weights of an uninterrupted run" {
  local steps=800 jobs job
  RUN_ID=one SKIP_PREFLIGHT=1 scripts/ssh/launch_singlenode.sh config/local3.yaml 2 "${SMALL[@]}" train.max_steps=$steps
  # A job has 25 s until the notice: at most 250 of these steps, so that at least three jobs are ended.
  cat >paced.py <<'END'
import time
import train
from distributed.torch import finish
from training.arguments import read_command_line

class Run(train.Run):
    def take_step(self, step):
        time.sleep(0.1)
        super().take_step(step)

train.Run = Run
finish(train.train(*read_command_line(__doc__)))
END
  TRAIN_SCRIPT=paced.py RUN_ID=linked SBATCH_SIGNAL=B:USR1@35 on login scripts/submit_with_config.sh config=config/local3.yaml \
    num_gpus_train=2 time=1 chain=9 "${SMALL[@]}" train.max_steps=$steps &>chain.out
  mapfile -t jobs < <(sed -n 's/^job  *\([0-9]*\) .*/\1/p' chain.out)
  eventually has_ended "${jobs[8]}"
  for job in "${jobs[@]}"; do field "$job" ExitCode; done >codes
  cat codes
  (($(grep -c =75:0 codes) >= 3))
  [[ $(weights_of linked) == "$(weights_of one)" ]]
  echo "# a chain of $(($(grep -c =75:0 codes) + 1)) jobs: the weights of an uninterrupted run" >&3
}

# bats test_tags=prove,long
# Each sbatch command passes --test-only unchanged; each command runs with two steps on small nodes.
@test "every command of the guide's chapter on SLURM runs" {
  local line small id jobs=() others=()
  mkdir logs
  ln -s -- "$ROOT/train.py" .
  PATH=${PYTHON%/*}:$PATH
  # shellcheck disable=SC2016 # the backquotes of a code block
  sed -n '/^## SLURM jobs$/,/^## /p' "$ROOT/LAUNCH_GUIDE.md" | sed -n '/^```bash$/,/^```$/{/^```/!p}' >commands
  while IFS= read -r line <&9; do
    small=$(sed -E 's/(--nodes[= ])4/\12/g; s/(per-node[= ]|gpu:)[48]/\11/g; s/array=1-3/array=1/
      s/num_gpus_train=[48]/num_gpus_train=2/; s/node001/node1/; s/partition=gpu/partition=batch/' <<<"$line")
    small+=" train.max_steps=2 train.eval_every=0 train.global_batch_size=4 model.layers=1 model.width=16"
    case $line in
      "sbatch "* | "LAUNCHER=srun sbatch "*)
        on login bash -c "${line/sbatch /sbatch --test-only }"
        jobs+=("$(on login bash -c "${small/sbatch /sbatch --parsable }")")
        ;;
      "salloc "* | "scripts/submit_with_config.sh "*)
        on login bash -c "$small" 3>&- &
        others+=($!)
        ;;
      *) echo "no test runs this command of the guide: $line" && return 1 ;;
    esac
  done 9<commands
  ((${#jobs[@]} >= 5 && ${#others[@]} >= 4))
  for id in "${others[@]}"; do wait "$id"; done
  eventually nothing_queued
  for id in "${jobs[@]}"; do
    run on login scontrol show job "$id"
    echo "$output"
    [[ $output == *JobState=COMPLETED* && $output != *ExitCode=[!0]* ]]
  done
  [[ $(grep -L '^done       step 2 ' logs/slurm-*.out) == "" ]]
}

# bats test_tags=prove,long
@test "the guide's batch file trains on all nodes, saves before its time limit and is requeued" {
  mkdir -p logs .venv/bin
  echo "PATH=${PYTHON%/*}:\$PATH" >.venv/bin/activate
  unset PYTHON
  sed -n '/^### Your own batch file$/,/^exec /p' "$ROOT/LAUNCH_GUIDE.md" | sed -n '/^#!/,$p' |
    sed -E -e 's/=gpu /=batch /; s/--nodes=4/--nodes=2/; s/(-per-(node|gpu))=8/\1=1/' \
      -e 's/--time=24:00:00/--time=1/; s/USR1@120/USR1@30/' \
      -e "s|~/launch-kit|$ROOT|; s|train.py .*|$ROOT/train.py --config config/local3.yaml ${LONG[*]}|" >job.sbatch
  JOB=$(on login sbatch --parsable job.sbatch)
  eventually grep -q '^resumed    after step' "logs/slurm-$JOB.out" || {
    cat "logs/slurm-$JOB.out"
    false
  }
  on login scancel "$JOB"
  grep -q '^ranks      2 = 2 nodes x 1, ' "logs/slurm-$JOB.out"
  grep -q '^stopped    after step [0-9]*, which is saved (SIGUSR1)$' "logs/slurm-$JOB.out"
  eventually has_ended "$JOB"
}

# bats test_tags=prove,long
@test "what the guide names instead of options that SLURM rejects beside those of the batch scripts" {
  local refused
  for refused in --gpus=4 --cpus-per-task=4; do
    run ! on login sbatch --test-only "$refused" --nodes=1 scripts/slurm/slurm_train.sh
  done
  job --nodes=2 --gpus-per-node=0 --gres=gpu:1 scripts/slurm/slurm_train.sh config/local3.yaml "${SMALL[@]}"
  grep -q '^ranks      2 = 2 nodes x 1, gloo$' job.out
  make_ordinary
  job --nodes=2 --gpus-per-node=1 --cpus-per-task=4 scripts/launch.sh --hosts job ordinary.py
  grep -q '^all 2$' job.out
  [[ $(field "$JOB" NumCPUs) == NumCPUs=8 ]]
}

# bats test_tags=prove,long
@test "the page's batch file for torchrun trains on all nodes, unchanged" {
  sed -n '/^### torchrun in your own SLURM script$/,/^  --node-rank/p' "$ROOT/docs/train-py.md" | sed -n '/^#!/,$p' >job.sbatch
  ln -s -- "$ROOT/train.py" .
  printf '%s\n' 'train: {max_steps: 6, batch_size: 3, eval_every: 0}' 'model: {layers: 1, width: 16}' >my.yaml
  RUN_ID=torchrun PATH=${PYTHON%/*}:$PATH job job.sbatch || { cat job.out && false; }
  grep -q '^model .* on 4 x cpu$' job.out
  [[ -d checkpoints/torchrun/step-6 ]]
}

@test "outside a job: exit 2, and what to do; --dry-run shows the sbatch command" {
  local name
  for name in slurm_train slurm_train_single_node; do
    run -2 on login "scripts/slurm/$name.sh" config/local3.yaml
    [[ $(grep -vE "$BY_THE_WAY" <<<"$output") == "$name.sh: this is not a SLURM job; use sbatch scripts/slurm/$name.sh, or salloc first [config-invalid]" ]]
  done
  SLURM_JOB_ID=99 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=node1 run -2 on login scripts/run_ddp.sh -c config/local3.yaml
  [[ $(grep -vE "$BY_THE_WAY" <<<"$output") == "run_ddp.sh: SLURM_JOB_ID is 99, a job that has ended; unset the SLURM_ variables, or salloc again [config-invalid]" ]]
  TRAIN_SCRIPT='my train.py' run --separate-stderr on login scripts/slurm/slurm_train.sh config/local3.yaml --dry-run -- 'a b'
  # shellcheck disable=SC2154 # run sets it
  [[ $status == 0 && $stderr == *"ranks      4 = 2 nodes x 2"* ]]
  [[ ${lines[-1]} == "cd $PWD && TRAIN_SCRIPT='my train.py' "*" sbatch scripts/slurm/slurm_train.sh config/local3.yaml -- 'a b'" ]]
}

# Each of these functions starts a script under one launcher, with one rank each on node1 and node2.
over_ssh() { # <script>
  on login scripts/launch.sh --hosts node1,node2 --nproc-per-node 1 "$1"
}

in_job() { # <script>
  rm -f job.out
  TRAIN_SCRIPT=$1 job --nodes=2 --gpus-per-node=1 scripts/slurm/slurm_train.sh - || { CODE=$? && cat job.out && return "$CODE"; }
  cat job.out
}

with_srun() { # <script>
  on login srun --nodes=2 --ntasks-per-node=1 "$PYTHON" "$1"
}

with_torchrun() { # <script>
  local words=(-m torch.distributed.run --nnodes=2 --master-addr=node1 --master-port=23456 "$1") other code=0
  on node2 "$PYTHON" "${words[@]:0:2}" --node-rank=1 "${words[@]:2}" 3>&- &
  other=$!
  on node1 "$PYTHON" "${words[@]:0:2}" --node-rank=0 "${words[@]:2}" || code=$?
  wait "$other" || code=$?
  return "$code"
}

# bats test_tags=prove,long
@test "a user's script, killed under four launchers, ends with the same bytes as an uninterrupted run" {
  local strategy launcher kill='    if epoch == 2 and env.rank == 1 and progress["step"] == 0: __import__("os").kill(__import__("os").getpid(), 9)'
  export PYTHONPATH=$ROOT/launcher/importable:$ROOT # srun and torchrun do not set it
  for strategy in ddp fsdp; do
    sed "s/^STRATEGY, DTYPE = \"ddp\"/STRATEGY, DTYPE = \"$strategy\"/" "$ROOT/examples/mixed_precision.py" >whole.py
    sed "s/^    model.eval()/$kill\n&/" whole.py >killed.py
    RUN_ID=whole-$strategy scripts/launch.sh --nproc-per-node 2 whole.py
    for launcher in over_ssh in_job with_srun with_torchrun; do
      export RUN_ID=$launcher-$strategy
      run ! "$launcher" killed.py
      run -0 "$launcher" killed.py
      [[ $output != *"epoch 1 "* && $output == *"epoch 6 "* ]]
      [[ $(weights_of "$RUN_ID") == "$(weights_of "whole-$strategy")" ]]
    done
  done
}

# bats test_tags=prove,long
@test "plain srun: a missing task and a rank that is used twice are named in one line" {
  local train=("$PYTHON" "$ROOT/train.py" --config "$ROOT/config/local3.yaml" "${SMALL[@]}" distributed.join_timeout=10)
  run ! on login srun --nodes=2 --ntasks=4 bash -c '((SLURM_PROCID == 3)) || exec "$@"' bash "${train[@]}"
  [[ $(grep -c '^train.py: 1 of 4 ranks did not join at [^ ]* within 10 s: rank 3; .*\[node-missing\]$' <<<"$output") == 3 ]]
  [[ $output != *Traceback* ]]
  run ! on login srun --nodes=2 --ntasks=4 bash -c '((SLURM_PROCID == 0)) || exec "$@"' bash "${train[@]}"
  [[ $(grep -c '^train.py: rank . on .* could not connect to .* within 10 s; .*\[node-missing\]$' <<<"$output") == 3 ]]
  [[ $output != *Traceback* && $output != *.cpp:* ]]
  # shellcheck disable=SC2016 # expanded by the task's shell
  run ! on login srun --nodes=2 --ntasks=4 bash -c 'SLURM_PROCID=$((SLURM_PROCID == 3 ? 2 : SLURM_PROCID)) exec "$@"' bash "${train[@]}"
  [[ $(grep -c '^train.py: rank 2 is used twice, on .*\[duplicate-node-rank\]$' <<<"$output") == 1 ]]
  [[ $output != *Traceback* ]]
}

# bats test_tags=prove,long
@test "the resume line of a run under salloc works from a plain shell" {
  local line
  RUN_ID=again on login salloc -Q --nodes=2 --gres=gpu:1 scripts/slurm/slurm_train.sh config/local3.yaml "${SMALL[@]}" &>first.out
  line=$(sed -n 's/^resume  *//p' first.out)
  [[ $line == "RUN_ID=again salloc --nodes=2 "*" --gres=gpu:1 "*"/slurm_train.sh config/local3.yaml "* ]]
  on login bash -c "$line train.max_steps=8" &>second.out
  grep -q '^resumed    after step 6$' second.out
  grep -q '"world_size": 2' logs/again/run.json
}

# bats test_tags=prove,long
@test "the resume line of a run under plain srun starts it with as many ranks" {
  local line
  PATH=${PYTHON%/*}:$PATH
  RUN_ID=plain on login srun --nodes=2 --ntasks=2 python "$ROOT/train.py" --config config/local3.yaml "${SMALL[@]}" &>first.out
  line=$(sed -n 's/^resume  *//p' first.out)
  [[ $line == "RUN_ID=plain srun --nodes=2 --ntasks=2 python $ROOT/train.py --config "* ]]
  on login bash -c "$line train.max_steps=8" &>second.out
  grep -q '^resumed    after step 6$' second.out
  grep -q '^model .* on 2 x cpu$' second.out
}

# This test must be the last, because it replaces the cluster, and with it the jobs of the others.
# bats test_tags=prove,long
@test "a job with the id of an earlier job is refused, and does not touch that job's run" {
  local words=(--nodes=1 --gpus-per-node=1 scripts/slurm/slurm_train.sh config/local3.yaml "${SMALL[@]}")
  cluster_up 1 # job ids start at 1 again
  job "${words[@]}"
  cluster_up 1
  run -3 job "${words[@]}"
  grep -q "run 1 belongs to another job with the same id (cluster box, submitted 2.*); .*\[foreign-run\]$" job.out
  [[ $(readlink checkpoints/1/latest) == step-6 ]]
  RUN_ID=mine job "${words[@]}" resume=checkpoints/1
  grep -q '^resumed    after step 6$' job.out
}
