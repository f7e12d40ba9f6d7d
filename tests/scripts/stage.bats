#!/usr/bin/env bats
# stage_env.sh, with a small environment whose Python is a script that runs the real one.
# shellcheck disable=SC2030,SC2031,SC2119,SC2120 # each test is a subshell, on purpose
bats_require_minimum_version 1.5.0
load helper

setup() {
  cd -- "$BATS_TEST_TMPDIR" || return
  mkdir -p env/bin env/lib/site-packages/first base/bin place
  printf '#!/bin/sh\n' >base/bin/python3.99
  ln -s python3.99 base/bin/python3
  ln -s "$PWD/base/bin/python3" env/bin/python3
  echo "home = $PWD/base/bin" >env/pyvenv.cfg
  make_python "$PWD/env" "$PWD/base"
  END=.tar
  ! command -v zstd >/dev/null || END=.tar.zst
  echo 'import os; print("from", os.environ["PYTHON_IS"])' >where.py
  export TRAIN_SCRIPT=where.py REAL=$PYTHON PYTHON=$PWD/env/bin/python
}

stage() { # [<word...>]
  "$ROOT/scripts/stage_env.sh" "${@:-$PWD/place}"
}

make_python() { # <prefix> <base prefix> [<where>]
  # shellcheck disable=SC2016 # expanded by the script
  printf '#!/bin/bash\n[[ $1 != -I ]] || exec printf "%%s\\n" %q %q %q %q\nPYTHON_IS=$0 exec "$REAL" "$@"\n' \
    "$1" "$2" "$1/lib/site-packages" "$1/lib/site-packages" >"${3:-env}/bin/python"
  chmod +x "${3:-env}/bin/python"
}

launch() {
  local PYTHON=$PYTHON
  PYTHON=$(stage)
  "$ROOT/scripts/ssh/launch_singlenode.sh" - 1 "$@"
}

staged() {
  echo "$PWD"/place/launch-kit-"$UID"/*/
}

# bats test_tags=slow
@test "packed once, unpacked once, used from there; packed again after a package was added" {
  umask 002
  run launch
  [[ $status == 0 && $output == *"packing $PWD/env into $PWD/logs/environments-$UID/"*"$END, once"* ]]
  local first
  first=$(staged)
  [[ $output == *"from ${first}env/bin/python"* ]]
  [[ $(<"${first}env/pyvenv.cfg") == "home = ${first}base/bin" ]]
  [[ $(readlink "${first}env/bin/python3") == ../../base/bin/python3.99 ]]
  [[ $(stat -c %a "place/launch-kit-$UID" "logs/environments-$UID") == $'700\n700' ]] # only we can change it
  run launch
  [[ $status == 0 && $output != *packing* && $output == *"from ${first}env/bin/python"* ]]
  mkdir env/lib/site-packages/second
  run launch
  [[ $status == 0 && $output == *packing* && -d $(staged)env/lib/site-packages/second ]]
  local archives=(logs/environments-$UID/*"$END")
  [[ ! -e $first && ${#archives[@]} == 1 ]]
}

# bats test_tags=slow,long
@test "an environment in use stays, and others do not wait for it" {
  launch
  local first lock
  first=$(staged)
  lock=${first%/}.lock
  exec 8>>"$lock"
  flock --shared 8
  PYTHON=$(stage) timeout 300 "$ROOT/scripts/ssh/launch_singlenode.sh" - 1
  mkdir env/lib/site-packages/second
  launch
  [[ -d $first ]]
}

# bats test_tags=slow,long
@test "an environment in a folder with a space" {
  mkdir "a b"
  mv env "a b/"
  make_python "$PWD/a b/env" /usr "a b/env"
  export PYTHON="$PWD/a b/env/bin/python"
  run launch
  [[ $status == 0 && $output == *"from $(staged)env/bin/python"* ]]
}

@test "a program that only launches unpacks nothing: --dry-run, a machine without ranks" {
  run launch --dry-run
  [[ $status == 0 && $output == *packing* && $output == *" $PWD/logs/environments-$UID/"*.python\ "$ROOT/scripts/lib/agent.py"* ]]
  [[ -z $(ls place) ]]
}

# bats test_tags=slow,long
@test "an incomplete or missing archive is refused" {
  launch
  local archive folder
  archive=$(echo logs/environments-$UID/*"$END")
  folder=$(staged)
  rm -r "$folder"
  printf 'x' >>"$archive"
  run launch
  [[ $status == 3 && $output == *"stage_env.sh: $HOST: $PWD/$archive cannot be unpacked or is incomplete (see above); remove it and run stage_env.sh again [env-missing]" ]]
  [[ ! -e $folder ]]
  run "$ROOT/scripts/stage_env.sh" --run "$PWD/none/none.tar" "${folder%/}" "$PYTHON" -u -c ''
  [[ $status == 3 && $output == "stage_env.sh: $HOST: $PWD/none/none.tar does not exist here, or belongs to another user; give a LOG_DIR that all nodes share, "* ]]
}

@test "a folder of packed environments that is a link is refused" {
  mkdir -p elsewhere logs
  ln -s "$PWD/elsewhere" "logs/environments-$UID"
  run stage
  [[ $status == 3 && $output == "stage_env.sh: $HOST: $PWD/logs/environments-$UID belongs to another user; give another LOG_DIR or FOLDER [env-missing]" ]]
}

@test "files that someone else could have put there are not run" {
  mkdir elsewhere
  ln -s "$PWD/elsewhere" "place/launch-kit-$UID"
  run launch
  [[ $status == 3 && $output == *"stage_env.sh: $HOST: $PWD/place/launch-kit-$UID belongs to another user; give another LOG_DIR or FOLDER [env-missing]" ]]
}

# bats test_tags=slow
@test "a machine that only launches does not need the nodes' folder" {
  fake_tool ssh 'exit 255'
  PYTHON=$(stage /nowhere/of-the-nodes) run "$ROOT/scripts/ssh/launch_torchrun_auto.sh" - 1 node1
  [[ $status == 3 && $output == *"[ssh-refused]"* ]]
  local archive
  archive=$(echo "$PWD"/logs/environments-$UID/*"$END")
  HOSTNAME=login.site run "$ROOT/scripts/stage_env.sh" --run "$archive" "/nowhere/of-the-nodes/launch-kit-$UID/x" "$PYTHON" -u -c ''
  [[ $status == 3 && $output == "stage_env.sh: $HOST: there is no folder /nowhere/of-the-nodes here; give stage_env.sh one that each node has [env-missing]" ]]
  [[ ! -e /nowhere ]]
}

@test "a folder without enough space is refused" {
  fake_tool df 'printf "Avail\n1\n"'
  run launch
  [[ $status == 3 && $output == *"$PWD/place/launch-kit-$UID has no room for "*"; give stage_env.sh a folder with more space [disk-low]" ]]
}

@test "an environment that cannot be copied is refused in one line" {
  local folder
  for folder in place ""; do
    run "$ROOT/scripts/stage_env.sh" "$folder"
    assert_refused 2 "FOLDER is '$folder'; give one absolute path, of a folder that each node has"
  done
  CONTAINER=$PWD/env run stage
  assert_refused 2 "CONTAINER is set, so there is no environment to copy; unset CONTAINER"
  PYTHON=$(stage) run stage
  [[ $status == 2 && $output == *"stage_env.sh: PYTHON is already a staged copy; unset it, or set it to the environment's own [config-invalid]" ]]
  rm -r logs
  make_python /usr /usr
  run stage
  [[ $status == 2 && $output == *": $PWD/env/bin/python is the system's Python, which is not copied; set PYTHON, VENV or CONDA_ENV to an environment [env-missing]" ]]
}
