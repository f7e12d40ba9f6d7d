#!/usr/bin/env bats
# scripts/explain.sh and scripts/checkpoint.sh, from any folder and next to any package.
bats_require_minimum_version 1.5.0
load helper

# Another project's package of the same name, such as Dask's.
make_distributed() {
  mkdir distributed
  echo 'raise SystemExit("the other distributed")' >distributed/__init__.py
  export PYTHONPATH=$PWD
}

# bats test_tags=slow
@test "sh SCRIPT works, where sh is dash and where it is bash" {
  type -P dash || skip "dash is not installed"
  local script
  for script in "$ROOT"/scripts/{,ssh/,slurm/,pbs/}*.sh; do
    run "$script" --help
    [[ $status == 0 && $output == *"usage: "* ]]
    diff <(dash "$script" --help) - <<<"$output"
    diff <(bash --posix "$script" --help) - <<<"$output"
  done
  cd "$ROOT/scripts"
  run dash launch.sh --dry-run x.py
  [[ $status == 0 && $output == *"'LAUNCH_COMMAND=./launch.sh x.py'"* ]]
}

@test "--help needs only what every sed has" {
  local script
  mkdir posix
  printf '#!/bin/sh\nexec %q --posix "$@"\n' "$(type -P sed)" >posix/sed # as strict as busybox's
  chmod +x posix/sed
  for script in "$ROOT"/scripts/{,ssh/,slurm/,pbs/}*.sh; do
    diff <("$script" --help) <(PATH=$PWD/posix:$PATH "$script" --help 2>&1)
  done
}

@test "--help that fails for want of a tool blames no disk" {
  mkdir broken
  printf '#!/bin/sh\necho "sed: no such command" >&2\nexit 1\n' >broken/sed
  chmod +x broken/sed
  PATH=$PWD/broken:$PATH run "$ROOT/scripts/explain.sh" --help
  [[ $status == 1 && $output == "sed: no such command" ]]
}

@test "explain.sh reads a log from a pipe" {
  make_distributed
  run bash -c 'echo "[rank3]: ValueError: boom" | "$0" -' "$ROOT/scripts/explain.sh"
  [[ $status == 0 && ${lines[0]} == "FAILED   rank 3 "*"[rank-error]" && $output == *"log      -:1"* ]]
}

@test "explain.sh prints a fault's section" {
  make_distributed
  run "$ROOT/scripts/explain.sh" rank-stuck
  [[ $status == 0 && ${lines[0]} == "## rank-stuck" && $output == *"**Do:**"* ]]
  [[ $output != *"## loss-not-finite"* ]]
}

# bats test_tags=slow
@test "explain.sh prints the block of a run: of the newest, by its id, or by its log" {
  make_distributed
  mkdir -p logs/one
  ln -s one logs/latest
  printf '%s\n' "FAILED   rank 1 (local rank 1, n1) 14 s after the start       [rank-error]" \
    "cause    ValueError: boom" "see      TROUBLESHOOTING.md#rank-error" >logs/one/failure.txt
  echo "[0] RuntimeError: Connection closed by peer" >logs/one/node_0.log
  cat logs/one/node_0.log logs/one/failure.txt >job.out
  local words
  for words in "" one logs/one job.out; do
    # shellcheck disable=SC2086 # "" must become no word
    run "$ROOT/scripts/explain.sh" $words
    [[ $status == 0 && $output == "$(<logs/one/failure.txt)" ]]
  done
  run "$ROOT/scripts/explain.sh" none.out
  [[ $status == 2 && $output == "explain.sh: none.out: No such file or directory; give a RUN, a FILE or a FAULT" ]]
}

# bats test_tags=slow
@test "checkpoint.sh finds our package beside another one called distributed" {
  make_distributed
  run "$ROOT/scripts/checkpoint.sh" ls none
  [[ $status == 2 && $output == "checkpoint: none holds no checkpoint; correct the path" ]]
}

@test "checkpoint.sh reports a Python without torch in one line" {
  mkdir torch
  echo "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')" >torch/__init__.py
  PYTHONPATH=$PWD run "$ROOT/scripts/checkpoint.sh" ls none
  assert_refused 3 "$PYTHON has no torch; set PYTHON or VENV to an environment that has it" env-missing
}

@test "a full disk: one line" {
  local words
  for words in --help rank-stuck; do
    run bash -c '"$0" "$1" >/dev/full' "$ROOT/scripts/explain.sh" "$words"
    [[ $status == 1 && ${#lines[@]} == 1 && $output == "explain.sh: cannot write the "* ]]
  done
}

@test "a reader that leaves, as head does, ends explain.sh without a message" {
  run bash -c 'set -o pipefail; "$0" link-lost 2>err | head -c 1; cat err' "$ROOT/scripts/explain.sh"
  [[ $output == "#" ]]
}
