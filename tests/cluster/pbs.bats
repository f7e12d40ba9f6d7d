#!/usr/bin/env bats
# PBS jobs, on the stand-in pbs.py: whatever stops a job, its ranks save first.
# shellcheck disable=SC2030,SC2031 # each test is a subshell, and is meant to be
bats_require_minimum_version 1.5.0
load helper
load ../scripts/helper

setup_file() {
  cluster_up 2
  "$BATS_TEST_DIRNAME/pbs.py" "$CLUSTER_DIR/pbs"
  export PATH=$CLUSTER_DIR/pbs/bin:$PATH
  on node1 pbs_mom
  on node2 pbs_mom
}

teardown_file() {
  cluster_down
}

setup() {
  cd -- "$BATS_TEST_TMPDIR" || return
  ln -s -- "$ROOT"/{config,scripts} .
  mkdir logs
  echo "{train: {max_steps: 100000, batch_size: 8, eval_every: 0}, model: {layers: 1, width: 16}, checkpoint: {every: 0}, tracking: []}" >long.yaml
  echo '{}' >"$CLUSTER_DIR/pbs/queue"
}

# Starts a job that reads long.yaml: a batch script or, with --, a command that leads its session.
# A job of one node needs no ssh, which does not work in it.
start() { # <nodes> [--]; sets JOB and NODES, and returns once the job has taken a step
  local options=(-l "select=$1:ncpus=1" -l place=scatter) given=PYTHON=$PYTHON,PREFLIGHT_SECONDS=20
  NODES=$1
  (($1 > 1)) || given+=,SSH_OPTS=-oPort=2222
  if [[ ${2:-} == -- ]]; then
    options+=(-j oe -o logs/ -v "$given" -- "$PWD/scripts/pbs/pbs_train.sh" long.yaml seed=2)
  else
    options+=(-v "$given,CONFIG=long.yaml" scripts/pbs/pbs_train.sh)
  fi
  JOB=$(on login qsub "${options[@]}")
  eventually has_begun
  ! is_over || { cat "logs/$JOB.OU" && false; }
}

has_begun() {
  is_over || has_lines 1 '^\(\[0\] \)\?step 1/'
}

has_lines() { # <number> <pattern>: in the job's output, which is in the spool until it ends
  [[ $(cat "$CLUSTER_DIR/pbs/spool/$JOB.OU" "logs/$JOB.OU" 2>/dev/null | grep -c "$2") == "$1" ]]
}

is_over() {
  [[ -d $CLUSTER_DIR/pbs/history/$JOB ]]
}

# The job saved each time it was stopped, and ended with this status; nothing is left anywhere.
has_saved() { # <signal> <Exit_status> [<number of stops>]
  local node
  eventually is_over
  cat "logs/$JOB.OU"
  has_lines "${3:-1}" "^\(\[0\] \)\?stopped    after step [0-9]*, which is saved ($1)$"
  has_lines "${3:-1}" "^stopped  by $1 after saving a checkpoint (code 75); nothing is left running"
  ((NODES == 1)) || has_lines "${3:-1}" '^ended      code 75; nothing is left running'
  has_lines 0 '^FAILED'
  on login qstat -xf "$JOB" | grep -qx "    Exit_status = $2"
  for node in node1 node2; do eventually is_gone_from "$node" "rdzv-id $JOB |exec bash -s$"; done
  (cd -- "$ROOT" && "$PYTHON" -m distributed.checkpoint verify "$BATS_TEST_TMPDIR/checkpoints/$JOB")
}

@test "qrerun saves, and the job resumes; qdel saves, and the job says how soon PBS will kill it" {
  echo '{"kill_delay": 39}' >"$CLUSTER_DIR/pbs/queue" # a second less than the warning asks for
  start 2
  on login qrerun "$JOB"
  eventually has_lines 1 '^\[0\] resumed    after step'
  on login qdel "$JOB"
  has_saved SIGTERM 271 2
  has_lines 2 ': warning: a stop can take 40 s (GRACE + 10), but PBS kills this job 39 s after qdel or the walltime (kill_delay of queue workq); '
}

@test "a job saves when its walltime ends" {
  echo '{"kill_delay": 40}' >"$CLUSTER_DIR/pbs/queue"
  start 1
  on login qalter -l walltime=0:0:1 "$JOB"
  has_saved SIGTERM -29
  has_lines 1 '^=>> PBS: job killed: walltime [0-9]* exceeded limit 1$'
  has_lines 0 'kill_delay'
}

# bats test_tags=prove,long
@test "qdel before the ranks start, while bash looks for Python or in the preflight: one line, and nothing is left" {
  local node part
  mkdir bin
  cat >bin/nvidia-smi <<SH
#!/bin/bash
[[ \$(uname -n) == node1 ]] || { touch $PWD/waits && exec sleep 600; }
exit 9
SH
  for part in shell preflight; do
    rm -f waits
    cat >python <<SH
#!/bin/bash
[[ $part\$* != shell*version_info* ]] || { touch $PWD/waits && exec sleep 600; }
PATH=$PWD/bin:\$PATH exec $PYTHON "\$@"
SH
    chmod +x bin/nvidia-smi python
    JOB=$(on login qsub -l select=2:ncpus=1 -l place=scatter -v "PYTHON=$PWD/python,CONFIG=long.yaml" scripts/pbs/pbs_train.sh)
    eventually test -e waits
    on login qdel "$JOB"
    eventually is_over
    cat "logs/$JOB.OU"
    has_lines 1 '^stopped  by SIGTERM; nothing was started$'
    [[ $(tail -n 1 "logs/$JOB.OU") == "stopped  by SIGTERM; nothing was started" ]]
    on login qstat -xf "$JOB" | grep -qx "    Exit_status = 271"
    for node in node1 node2; do eventually is_gone_from "$node" "far_side|exec bash -s$|pbs_train|sleep 600"; done
  done
}

@test "a job that PBS suspends for 23 s goes on, and saves" {
  echo '{"kill_delay": 40}' >"$CLUSTER_DIR/pbs/queue"
  local shown
  start 2
  on login qsig -s suspend "$JOB"
  sleep 23 # the suspension itself
  shown=$(step)
  on login qsig -s resume "$JOB"
  eventually has_gone_on "$shown"
  on login qdel "$JOB"
  has_saved SIGTERM 271
}

step() { # the last step in the log of rank 0's node
  sed -n 's/^\[0\] step \([0-9]*\).*/\1/p' "logs/$JOB/node_0.log" | tail -n 1
}

has_gone_on() { # <step>
  is_over || (($(step) > $1 + 100))
}

@test "qsig -s SIGUSR1 saves, where the launcher leads the job's session; the resume line has what the job had" {
  start 1 --
  on login qsig -s SIGUSR1 "$JOB"
  has_saved SIGUSR1 75
  has_lines 1 "^resume   .* qsub -V -N train -j oe -o logs/ -l select=1:ncpus=1 -l place=scatter -q workq -- $PWD/scripts/pbs/pbs_train.sh long.yaml seed=2$"
  has_lines 1 ': warning: a stop can take 40 s (GRACE + 10), but PBS kills this job 10 s after qdel or the walltime'
}

@test "what follows -- of qsub gets the environment that a real PBS gave it" {
  local names='s/^\([A-Za-z_]*\)=.*/\1/p'
  JOB=$(on login env SHELL=/bin/bash LOGNAME=root qsub -l select=2:ncpus=2 -j oe -o logs/ -v VENV=/home/user/venv -- /usr/bin/env)
  eventually is_over
  cat "logs/$JOB.OU"
  diff <(grep -vE '^(argv0|pid|PWD|SHLVL|_)=' "$ROOT/tests/cluster/pbs/job-env-dashdash-no-V.txt" | sed -n "$names" | sort) \
    <(grep -v '^PBS_CONF_FILE=' "logs/$JOB.OU" | sed -n "$names" | sort)
  has_lines 1 '^PATH=/bin:/usr/bin$'
}

# A script that prints some variables, its host, whether it got the prompt below, and WHO.
make_seen() {
  cat >seen.py <<'PY'
import os, sys
print(*(os.environ.get(name, "-") for name in os.environ["SHOWN"].split()), os.uname().nodename, flush=True)
print(sys.argv[1:] == ["--prompt", "写一首关于春天的诗,要求五言绝句,押韵,并且包含山水花鸟四种意象"], ascii(os.environ.get("WHO")), flush=True)
PY
}

@test "a job without a shell: a rank for each GPU of its chunks, and each node's own GPUs and threads; the script gets any characters" {
  make_seen
  JOB=$(on login qsub -l select=2:ncpus=4:ngpus=2:ompthreads=3 -l place=scatter -j oe -o logs/ \
    -v "PYTHON=$PYTHON,PREFLIGHT_SECONDS=20,BACKEND=gloo,SHOW_RANKS=all,TRAIN_SCRIPT=seen.py,SHOWN=CUDA_VISIBLE_DEVICES OMP_NUM_THREADS,WHO=J"$'\374'"rgen" \
    -- "$PWD/scripts/pbs/pbs_train.sh" - -- --prompt "写一首关于春天的诗,要求五言绝句,押韵,并且包含山水花鸟四种意象")
  eventually is_over
  cat "logs/$JOB.OU"
  has_lines 1 '^ranks      4 = 2 nodes x 2, gloo$'
  local node
  for node in node1 node2; do has_lines 2 "^\[.*\] GPU-of-$node-0,GPU-of-$node-1 3 $node$"; done
  has_lines 4 "^\[.*\] True 'J.udcfcrgen'$"
  on login qstat -xf "$JOB" | grep -qx "    Exit_status = 0"
}

@test "each task of an array has its number, on each of its nodes" {
  make_seen
  local task array node given="PYTHON=$PYTHON,PREFLIGHT_SECONDS=20,SHOW_RANKS=all,TRAIN_SCRIPT=seen.py"
  given+=",SHOWN=PBS_ARRAY_INDEX PBS_JOBID PBS_JOBNAME PBS_O_WORKDIR"
  array=$(on login qsub -J 3-4 -l select=2:ncpus=1 -l place=scatter -N arr -j oe -o logs/ -v "$given" -- "$PWD/scripts/pbs/pbs_train.sh" -)
  for task in 3 4; do
    JOB=${array%%[*}[$task].head
    eventually is_over
    cat "logs/$JOB.OU"
    for node in node1 node2; do grep -qxE "\[.\] (\[rank.\] )?$task ${JOB%%[*}\[$task\]\.head arr $PWD $node" "logs/$JOB.OU"; done
  done
}

@test "if PBS starts a job again because it has lost the first node's mom, the first start saves, and then the second resumes" {
  echo '{"kill_delay": 40}' >"$CLUSTER_DIR/pbs/queue"
  start 2
  on node1 kill -KILL "$(<"$CLUSTER_DIR/pbs/moms/node1")"
  on login lose_node "$JOB"
  on node1 pbs_mom # which no longer knows the job
  eventually has_lines 1 '^\[0\] resumed    after step'
  on login qdel "$JOB"
  has_saved SIGTERM 271 2
  has_lines 1 '^waiting up to 55 s for this job.s earlier start, on node1, to save and stop$'
  has_lines 1 '^\[0\] node agent: the scheduler has started this job again; stopping this start$'
  # The second start takes its first step only after the first one has ended.
  sed -n 's/^\(ended\|\[0\] resumed\) .*/\1/p' "logs/$JOB.OU" | diff - <(printf '%s\n' ended '[0] resumed' ended)
}

# bats test_tags=prove,long
@test "the guide's recipe with pbsdsh trains on both nodes, and qdel ends it" {
  sed -n '/^\*\*Through pbsdsh/,/^pbsdsh/p' "$ROOT/docs/reference.md" | sed -n '/^#!/,$p' |
    sed -e 's/:ngpus=4//' -e 's|config/local3.yaml|long.yaml|' >recipe.sh
  on login bash -c "umask 077; openssl rand -hex 32 >~/.run-secret"
  JOB=$(on login qsub -j oe -o logs/ -v "PYTHON=$PYTHON" recipe.sh)
  eventually has_trained
  ! is_over || { cat "logs/$JOB.OU" && false; }
  has_lines 2 '^ranks      2 = 2 nodes x 1, gloo'
  on login qdel "$JOB"
  eventually is_over
  cat "logs/$JOB.OU"
  has_lines 2 '^pbsdsh: killing task 0x0000000[23] signal 15$'
  for node in node1 node2; do eventually is_gone_from "$node" "rdzv-id $JOB "; done
}

# bats test_tags=prove,long
@test "the guide's batch file trains on both nodes, and qdel saves" {
  sed -n '/^### Your own batch file for PBS$/,/^~/p' "$ROOT/LAUNCH_GUIDE.md" | sed -n '/^#!/,$p' |
    sed -E -e '/^source |^#PBS -[qA] /d; s/select=.*/select=2:ncpus=1/' \
      -e "s|~/launch-kit|$ROOT|; s|train.py .*|$ROOT/train.py --config long.yaml|" >own.sh
  NODES=2
  JOB=$(on login qsub -v "PYTHON=$PYTHON,PREFLIGHT_SECONDS=20" own.sh)
  eventually has_begun
  ! is_over || { cat "logs/$JOB.OU" && false; }
  has_lines 1 '^ranks      2 = 2 nodes x 1, gloo'
  on login qdel "$JOB"
  has_saved SIGTERM 271
  # The resume line submits this file again, from any shell.
  sed -n "s/^resume   //p" "logs/$JOB.OU" >resume.sh
  grep -q " qsub -V .* own.sh$" resume.sh
  JOB=$(on login bash resume.sh)
  eventually has_lines 1 '^\[0\] resumed    after step'
  on login qdel "$JOB"
  eventually is_over
}

has_trained() {
  is_over || has_lines 1 'step 1/'
}

# Stops jobs in one way, each at a random moment. Runs in the background, once for each way.
stop_jobs() { # <qdel|walltime|qsig> <times>
  local number
  for ((number = 0; number < $2; number++)); do
    if [[ $1 == qsig ]]; then start 2 --; else start 2; fi
    sleep "0.$((RANDOM % 10))" # the random moment itself
    case $1 in
      qdel)
        on login qdel "$JOB"
        has_saved SIGTERM 271
        ;;
      walltime)
        on login qalter -l walltime=0:0:1 "$JOB"
        has_saved SIGTERM -29
        ;;
      qsig)
        on login qsig -s USR1 "$JOB"
        has_saved SIGUSR1 75
        ;;
    esac
  done
  echo "# $1: $number of $2 saved, none reported as a failure, no process left" >&3
}

# bats test_tags=prove,long
@test "after qdel, walltime, qrerun and qsig at random moments a job saves and leaves nothing behind" {
  local number times=${TIMES:-1} what shells=()
  echo '{"kill_delay": 35}' >"$CLUSTER_DIR/pbs/queue" # GRACE + 5: enough if the nodes answer
  for what in qdel walltime qsig; do
    stop_jobs "$what" "$times" >"$what.out" 2>&1 &
    shells+=($!)
  done
  start 2
  for ((number = 1; number <= times; number++)); do
    sleep "0.$((RANDOM % 10))"
    on login qrerun "$JOB"
    eventually has_lines "$number" '^\[0\] resumed    after step'
  done
  on login qdel "$JOB"
  has_saved SIGTERM 271 $((times + 1))
  echo "# qrerun: $times of $times saved and resumed, none reported as a failure, no process left" >&3
  for number in "${!shells[@]}"; do
    wait "${shells[number]}" || { tail -n 60 ./*.out && false; }
  done
}
