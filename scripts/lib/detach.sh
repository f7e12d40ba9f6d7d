# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# Runs that outlive the terminal: to start, to look at and to stop, all on one machine.
#
# <run folder>/launcher_<host> has their launcher, `process birth grace since`, and in a second line
# its exit code.

# Starts this script again, in a session of its own, and leaves when the agents are about to start.
detach() {
  local folder log size code=0 started again=(${LOG_DIR:+"LOG_DIR=$LOG_DIR"} "${LAUNCH_LINE[0]}")
  refuse_scheduled --detach
  plan_run_id
  [[ -n ${plan[run_id]} ]] || die 2 "node rank 0 names the run, and --detach must know its name; give RUN_ID, the same on every node"
  ! read_run "${plan[run_id]}" || [[ $STATE != running ]] ||
    refuse run-is-live "run ${plan[run_id]} is live: process $LAUNCHER_ID; wait for its end, or choose another RUN_ID"
  folder=${LOG_DIR:-logs}/${plan[run_id]} log=$folder/launcher_$HOST.log
  # shellcheck disable=SC2174 # the folder above it is not private
  { mkdir -p -m 700 -- "$folder" && : >>"$log"; } 2>/dev/null || refuse dir-unwritable "cannot write to ${folder@Q}; set LOG_DIR"
  size=$(stat -c %s -- "$log")
  exec {started}< <(start_apart)
  read -r -u "$started" || wait $! || code=$?
  tail -c +$((size + 1)) -- "$log" >&2
  if ((code != 0)); then
    [[ -e $folder/launcher_$HOST ]] || rm -f -- "$log" # nothing was started before either
    rmdir --ignore-fail-on-non-empty -- "$folder"
    exit "$code"
  fi
  print_row detached "tail -f $(quote_line "$log")"
  print_row status "$(quote_line "${again[@]}" --status "${plan[run_id]}")"
  print_row stop "$(quote_line "${again[@]}" --stop "${plan[run_id]}")"
}

# A shell stays beside the launcher and notes its exit code.
start_apart() {
  exec 3>&1 >>"$log" 2>&1 </dev/null
  LAUNCHER_RECORD=$(cd -- "$folder" && pwd)/launcher_$HOST
  export LAUNCHER_RECORD RUN_ID=${plan[run_id]}
  # shellcheck disable=SC2016 # that shell's own
  exec setsid "$BASH" -c '"$@"; code=$?; [[ ! -e $0 ]] || echo "$code" >>"$0"; exit "$code"' "$LAUNCHER_RECORD" "$BASH" "${LAUNCH_LINE[@]}"
}

# In the detached launcher, when nothing is left to refuse.
note_start() {
  printf started >&3 # where nobody waits for it any more, this ends us
  printf '%s %s %s %(%FT%T)T\n' $$ "$(birth_of $$)" "${GRACE:-30}" -1 >"$LAUNCHER_RECORD"
  echo >&3
  exec 3>&-
  unset LAUNCHER_RECORD
}

# When the kernel started it: its id may be another's later on.
birth_of() { # <process>
  sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20
}

# Where a scheduler holds the run, it can do all this itself.
refuse_scheduled() { # <option>
  [[ $FANOUT != srun && -z ${SLURM_JOB_ID:-}${PBS_JOBID:-} ]] ||
    die 2 "$1 is for runs that no scheduler holds; use sbatch, squeue and scancel (PBS: qsub, qstat and qdel)"
}

# Those of this machine; the one that started or ended last comes last.
detached_runs() {
  find "${LOG_DIR:-logs}" -mindepth 2 -maxdepth 2 -name "launcher_$HOST" -printf '%T@ %h\n' 2>/dev/null | sort -n | sed 's|.*/||'
}

# Sets LAUNCHER_ID, GRACE_S, SINCE and STATE; fails where this machine has detached no such run.
read_run() { # <run id>
  local birth code=''
  [[ -r ${LOG_DIR:-logs}/$1/launcher_$HOST ]] || return
  { read -r LAUNCHER_ID birth GRACE_S SINCE && read -r code; } <"${LOG_DIR:-logs}/$1/launcher_$HOST" || true
  if [[ -n $code ]]; then
    STATE="ended, code $code"
  elif [[ -n $birth && $(birth_of "$LAUNCHER_ID") == "$birth" ]]; then
    STATE=running
  else
    STATE=killed
  fi
}

# The same for one that the user names.
find_run() { # <run id>
  local known near others=("${LOG_DIR:-logs}/$1"/launcher_*.log)
  read_run "$1" && return
  [[ ! -e ${others[0]} ]] || die 3 "run $1 was detached on another machine, see ${others[0]@Q}; say it there"
  choose_python
  mapfile -t known < <(detached_runs)
  near=$(nearest "$1" "${known[@]}")
  die 2 "no run ${1@Q} was detached on $HOST with its logs in ${LOG_DIR:-logs}; ${near:+did you mean $near? }--status shows all"
}

print_status() { # [<run id>...]
  local run runs=("$@")
  refuse_scheduled --status
  (($#)) || mapfile -t runs < <(detached_runs)
  ((${#runs[@]})) || echo "$PROGRAM: no run was detached on $HOST with its logs in ${LOG_DIR:-logs}" >&2
  for run in "${runs[@]}"; do
    find_run "$run"
    printf '%s  %-15s  since %s  %s\n' "$run" "$STATE" "$SINCE" "$(how_far "${LOG_DIR:-logs}/$run")"
  done
}

# What node 0 said last before its closing lines; where its log is not on this disk, the launcher.
how_far() { # <run folder>
  {
    tail -n 1 -- "$1/launcher_$HOST.log"
    tail -n 9 -- "$1/node_0.log" | grep -vE '^\[0\] (checkpoint|logs|resume) '
  } 2>/dev/null | tail -n 1
}

# The ranks may save first.
stop_run() { # <run id>
  local end
  refuse_scheduled --stop
  (($# == 1)) || die 2 "--stop takes one run; --status shows all"
  find_run "$1"
  [[ $STATE == running ]] || die 3 "run $1 is not running: $STATE; there is nothing to stop"
  if [[ -n $DRY_RUN ]]; then echo "kill -TERM $LAUNCHER_ID" && return; fi
  kill -TERM "$LAUNCHER_ID" 2>/dev/null || true # it may have ended just now
  echo "$PROGRAM: run $1 is told to stop; waiting for its end, $((GRACE_S + 25)) s at most" >&2
  end=$((SECONDS + GRACE_S + 25))
  until [[ $STATE == ended* ]] || ((SECONDS > end)); do
    sleep 0.1
    read_run "$1"
  done
  [[ $STATE != running ]] || die 3 "run $1 is still there; kill -KILL $LAUNCHER_ID ends it without a save"
  print_status "$1"
}
