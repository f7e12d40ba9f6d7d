#!/usr/bin/env bats
# CONTAINER: the command for each runtime. tests/cluster/containers.bats runs two of them.
# shellcheck disable=SC2030,SC2031 # each test is a subshell, on purpose
bats_require_minimum_version 1.5.0
load helper

AGENT="/opt/python $ROOT/scripts/lib/agent.py"

setup() {
  mkdir -p "$BATS_TEST_TMPDIR/home" && cd -- "$BATS_TEST_TMPDIR/home" || return
  FOLDER=$PWD
  touch image.sif image.sqsh
  mkdir -p "$HOME/data" image "$HOME/checkpoints"
  printf 'data: {path: %s}\ncheckpoint: {dir: %s/new/deep}\n' "$HOME/data" "$HOME/checkpoints" >plain.yaml
  touch own.py
  export RUN_ID=golden MASTER_PORT=23456 PYTHON=/opt/python TRAIN_SCRIPT=own.py
}

# The part of a dry run's command that follows the variables.
command_of() { # <script and arguments...>
  run --separate-stderr "$ROOT/scripts/$1" "${@:2}" --dry-run
  # shellcheck disable=SC2154 # set by run
  [[ $status == 0 ]] || { echo "$output $stderr" && return 1; }
  WORDS=$(bash -c 'env() { while [[ $1 == *=* ]]; do shift; done; printf "%s\n" "$*"; }; '"${output##*&& }")
}

@test "image.sif: Apptainer, with the folders named by the run and its config" {
  export CONTAINER=image.sif CONTAINER_ARGS="--bind '/a b'"
  command_of ssh/launch_singlenode.sh plain.yaml 2
  [[ $WORDS == "apptainer exec --nv --pwd=$FOLDER "*" --bind /a b $FOLDER/image.sif $AGENT --nnodes 1 "* ]]
  local folder
  for folder in "$ROOT" "$HOME/data" "$HOME/checkpoints"; do
    [[ $folder == /tmp/* || $WORDS == *" --bind=$folder "* ]]
  done
  [[ $stderr == *"container  $FOLDER/image.sif (apptainer)"* ]]
  BACKEND=gloo command_of ssh/launch_singlenode.sh plain.yaml 2
  [[ $WORDS == "apptainer exec --pwd="* ]]
}

@test "the folders named in a config's defaults, however they are listed" {
  mkdir base
  echo 'data: {path: /var/tmp}' >base/site.yaml
  echo 'checkpoint: {dir: /opt/new}' >shared.yaml
  printf 'defaults: [\n  base/site,\n  "shared"]\n' >own.yaml
  CONTAINER=image.sif command_of ssh/launch_singlenode.sh own.yaml 2
  [[ $WORDS == *" --bind=/opt "*" --bind=/var/tmp "* ]]
}

@test "a folder: Charliecloud; image.sqsh: Enroot; podman:NAME: podman" {
  local seen="--bind=$ROOT "
  [[ $ROOT != /tmp/* ]] || seen='' # every Charliecloud container sees /tmp
  CONTAINER=image command_of ssh/launch_singlenode.sh plain.yaml 2
  [[ $WORDS == "ch-run --cd=$FOLDER $seen$FOLDER/image -- $AGENT --nnodes 1 "* ]]
  CONTAINER=image.sqsh command_of ssh/launch_singlenode.sh plain.yaml 2
  [[ $WORDS == "bash -c options=()"*"enroot start "*" --mount $ROOT:$ROOT "*"$FOLDER/image.sqsh env --chdir=$FOLDER $AGENT "* ]]
  CONTAINER=podman:reg.io/torch:2 command_of ssh/launch_singlenode.sh plain.yaml 2
  [[ $WORDS == "sh -c if "*"LAUNCH_CLIENT="*"podman run "*"--pull=never "*" --pid=host "*" --workdir=$FOLDER "*"--volume=$ROOT:$ROOT "*"reg.io/torch:2 $AGENT "* ]]
}

@test "a relative image is found from the folder where it was typed, also for the self-test" {
  unset TRAIN_SCRIPT
  CONTAINER=image command_of test_distributed.sh 2
  [[ $WORDS == "ch-run --cd=$ROOT "*"$FOLDER/image -- $AGENT "* ]]
}

@test "Enroot gets the names of the variables, but no values" {
  fake_tool enroot 'printf "%s\n" "$*"'
  CONTAINER=image.sqsh run --separate-stderr "$ROOT/scripts/ssh/launch_singlenode.sh" - 1 --dry-run
  run env RUN_SECRET=hidden LD_PRELOAD='' bash -c "$output"
  [[ $output == *"--env RUN_SECRET "* && $output != *hidden* && $output != *"--env PATH"* && $output != *"--env LD_"* ]]
}

@test "over ssh each node runs inside the container, and each program starts once" {
  CONTAINER=image run --separate-stderr "$ROOT/scripts/ssh/launch_torchrun_auto.sh" plain.yaml 1 node1 node2 --dry-run
  [[ $output == *"ssh -t -- node1 "*"ch-run --cd=$FOLDER "*" -- $AGENT --nnodes 2 "* ]]
}

@test "in a SLURM job srun and pyxis load image.sqsh, or a registry's image" {
  fake_tool squeue 'echo 7 RUNNING'
  fake_tool srun 'exit 9'
  local image
  export SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=1 SLURM_NNODES=1 SLURM_JOB_NODELIST=node1 SLURM_NODELIST=node1
  for image in image.sqsh nvcr.io/nvidia/pytorch:25.01-py3; do
    CONTAINER=$image run --separate-stderr "$ROOT/scripts/slurm/slurm_train_single_node.sh" plain.yaml
    cat <<<"$output $stderr"
    [[ $stderr == *"node1: the preflight did not start, see above; "*" [env-missing]" ]]
  done
  fake_tool srun 'printf "%s\n" "$*" >&2; exit 9'
  CONTAINER=$image run "$ROOT/scripts/slurm/slurm_train_single_node.sh" plain.yaml
  [[ $output == *" --container-image=$image --container-name=golden --container-mounts="*"$ROOT:$ROOT"*" --container-workdir=$FOLDER "* ]]
  [[ $output != *ch-run* ]]
}

# bats test_tags=slow
@test "a bad CONTAINER is refused in one line" {
  CONTAINER=none.sif run "$ROOT/scripts/ssh/launch_singlenode.sh" plain.yaml 2
  assert_refused 2 "CONTAINER names 'none.sif', which does not exist; correct its path"
  CONTAINER=nvcr.io/x run "$ROOT/scripts/ssh/launch_singlenode.sh" plain.yaml 2
  assert_refused 2 "which only pyxis can load, and only in a SLURM job; give an image file or folder, or podman:nvcr.io/x"
  CONTAINER=image CONTAINER_ARGS="'" run "$ROOT/scripts/ssh/launch_singlenode.sh" plain.yaml 2
  assert_refused 2 "CONTAINER_ARGS: No closing quotation; quote it as for a shell"
  mkdir bare
  ln -s "$(type -P python3)" bare/
  CONTAINER=image PATH=$(bare_path && echo "$PATH") run "$ROOT/scripts/ssh/launch_singlenode.sh" plain.yaml 2
  assert_refused 3 "ch-run: No such file or directory; install charliecloud, or unset CONTAINER" env-missing
}

@test "the resume line repeats the container and its Python" {
  CONTAINER=image run "$ROOT/scripts/ssh/launch_singlenode.sh" plain.yaml 2 --dry-run
  [[ $output == *"CONTAINER=image PYTHON=/opt/python $ROOT/scripts/ssh/launch_singlenode.sh plain.yaml 2"* ]]
}
