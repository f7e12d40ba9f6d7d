# shellcheck shell=bats disable=SC2034,SC2154 # shared with the tests, and with run
# Shared by the tests of the scripts. Each test has its own working directory.

ROOT=$(cd -- "$BATS_TEST_DIRNAME/../.." && pwd -P)
HOST=${HOSTNAME%%.*}

# shellcheck source=tests/isolate.bash
source "$ROOT/tests/isolate.bash"
isolate_test

setup() {
  cd -- "$BATS_TEST_TMPDIR" || return
  make_config plain.yaml
}

make_config() { # <file>
  echo "train: {max_steps: 1, batch_size: 1}" >"$1"
}

# A training script that writes its arguments, byte for byte, as JSON.
make_dump() {
  cat >dump.py <<'PY'
import json, os, sys
if os.environ["RANK"] == "0":
    with open("dump.json", "w") as file:
        json.dump(sys.argv[1:], file)
PY
  export TRAIN_SCRIPT=dump.py
}

# Makes a module the training script.
make_module() {
  mkdir pkg
  cat >pkg/mod.py <<'PY'
import os, sys
print("pkg.mod", int(os.environ["RANK"]) + 1, "of", os.environ["WORLD_SIZE"] + ":", *sys.argv[1:])
PY
  export TRAIN_SCRIPT="-m pkg.mod"
}

# Text that a shell along the way could change.
# shellcheck disable=SC2016 # must not be expanded
{
  ODD_CONFIG=$'odd \'name\' "$HOME" `x` \\ \u00fc\n.yaml'
  ODD_SETTINGS=('a.b=1 2' 'c="$x" *' $'d=\u00e9\n' 'e=')
  ODD_REST=(--last 'f=$(g)' '' $'\t' --log '$$5' '${local_rank}')
}

assert_odd_dumped() {
  assert_dumped --config "$ODD_CONFIG" "${ODD_SETTINGS[@]}" "${ODD_REST[@]}"
}

assert_dumped() { # <argument expected...>
  "$PYTHON" -c 'import json, sys; got = json.load(open("dump.json")); assert got == sys.argv[1:], got' "$@"
}

# The last run was rejected with this code, in one line that contains the text; nothing was started.
assert_refused() { # <exit code> <text> [<fault>]
  # Every line that stops a launch ends with the name of exactly one fault.
  local ends='\[[a-z-]+\]$|^make init: ' twice='\[[a-z-]+\] \[[a-z-]+\]$'
  [[ $1 == [23] ]] || ends=''
  if [[ $status != "$1" || ${#lines[@]} != 1 || -e logs || ! $output =~ $ends || $output =~ $twice ]] ||
    [[ $output != *"$2"* || (-n ${3:-} && $output != *" [$3]") ]]; then
    printf 'expected code %s and one line with: %s\ngot code %s: %s\n' "$1" "$2 ${3:-}" "$status" "$output"
    return 1
  fi
}

assert_output() { # <text>
  diff <(printf '%s\n' "$1") <(printf '%s\n' "$output")
}

# The golden command of a node, with the parts that differ between machines filled in.
golden_command() { # <launcher's line> <nnodes> <node rank> <nproc> <master> <script and arguments>
  printf '%s' "cd $PWD && env RUN_ID=golden 'LAUNCH_COMMAND=$1' $PYTHON $ROOT/scripts/lib/agent.py" \
    " --nnodes $2 --node-rank $3 --master-addr $5 --nproc-per-node $4 --master-port 23456" \
    " --rdzv-conf join_timeout=300 --log-dir logs --rdzv-id golden $6"
}

# Puts a tool on PATH that this machine lacks, or that behaves differently here.
fake_tool() { # <name> <bash script>
  mkdir -p fake
  printf '#!/usr/bin/env bash\n%s\n' "$2" >"fake/$1"
  chmod +x "fake/$1"
  [[ $PATH == "$PWD/fake:"* ]] || PATH=$PWD/fake:$PATH
}

fake_gpus() { # <number>
  fake_tool nvidia-smi "[[ \$1 == --query-gpu=* ]] || exit 0
for ((i = 0; i < $1; i++)); do echo \"\$i, GPU-\$i, 0, 580.65.06, Disabled\"; done"
}

# Creates hang_up.py, which runs a line of bash in a terminal and then hangs up.
make_hang_up() {
  cat >hang_up.py <<'PY'
import os, pty, signal, sys
pid, terminal = pty.fork()
if pid == 0:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    os.execvp("bash", ["bash", "-c", sys.argv[1] + "\necho the end of $?; exec sleep 600"])
shown = b""
while b"the end of " not in shown:
    shown += os.read(terminal, 4096)
os.close(terminal)
os.waitpid(pid, 0)
print(shown.decode().replace("\r", ""))
PY
}

# A PATH with only what the launchers themselves need.
bare_path() {
  local tool
  mkdir -p bare
  for tool in bash env dirname readlink sed awk cat uname; do
    ln -sf "$(type -P "$tool")" bare/
  done
  # shellcheck disable=SC2123 # intended
  PATH=$PWD/bare
}
