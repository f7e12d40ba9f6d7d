# shellcheck shell=bash
# Shared by the tests on the cluster in a box. Each file has its own cluster, and each test its own
# working directory, which every host sees.

CLUSTER=${BATS_TEST_DIRNAME:?}/cluster.sh
PATIENCE_S=600 # only ends a test that hangs: an idle machine needs less than a tenth of it

# shellcheck source=tests/isolate.bash
source "$BATS_TEST_DIRNAME/../isolate.bash"
isolate_test

setup() {
  cd -- "${BATS_TEST_TMPDIR:?}" || return
}

cluster_up() { # <nodes>
  export CLUSTER_DIR=$BATS_FILE_TMPDIR/cluster UP_S=$SECONDS
  "$CLUSTER" up "$1"
  UP_S=$((SECONDS - UP_S))
}

cluster_down() {
  "$CLUSTER" down
}

on() { # <host> <command...>
  "$CLUSTER" run "$@"
}

# Submits a command as a job; prints the job's id once it is running.
submit() { # <sbatch options and command...>
  local job options=()
  while [[ $1 == --* ]]; do
    options+=("$1")
    shift
  done
  job=$(on login sbatch --parsable --output=/dev/null "${options[@]}" --wrap "$*")
  eventually is_running "$job" 0
  echo "$job"
}

is_running() { # <job> <restarts>
  [[ $(on login scontrol show job "$1") == *JobState=RUNNING*Restarts="$2"* ]]
}

has_ended() { # <job>
  local left code=0
  left=$(on login squeue -h -j "$1" 2>&1) || code=$?
  [[ ($code == 0 && -z $left) || $left == *"Invalid job id"* ]] # otherwise SLURM has not answered
}

node_state_is() { # <node> <state>
  [[ $(on login sinfo -h -p batch -n "$1" -o %T) == "$2" ]]
}

is_gone_from() { # <host> <pattern of a command line>
  ! on "$1" pgrep -f "$2"
}

# shellcheck disable=SC2034 # the tests read CODE
end_of() { # <process> sets CODE
  CODE=0
  wait "$1" || CODE=$?
}

# The launcher of a run: another test, or a user, may run launchers at the same time.
launcher_pid() { # <run id>
  sed -n 's/^ *"process": \([0-9]*\),$/\1/p' "logs/$1/run.json"
}

eventually() { # <command...>
  local end=$((SECONDS + PATIENCE_S))
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < end)) || {
      echo "not within $PATIENCE_S s: $*"
      return 1
    }
    sleep 0.3 # polling takes CPU time too
  done
}

# An ordinary script, whose model outlives the process group. It can also import the helper.
make_ordinary() {
  cat >ordinary.py <<'PY'
import torch, torch.distributed as dist
from torch_launch_kit.distributed import torch as helper
def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert helper.mean(total) == total
    dist.destroy_process_group()
    print(f"all {int(total)}", flush=True)
main()
PY
}

# The loop of docs/your-script.md as a program. Its arguments: STEPS STRATEGY WORKERS SECONDS.
make_page_loop() {
  local root=$BATS_TEST_DIRNAME/../..
  PYTHONPATH=$root "$PYTHON" "$root/tests/unit/page_loop.py" >page.py
}
