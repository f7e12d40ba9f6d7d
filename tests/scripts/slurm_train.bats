#!/usr/bin/env bats
# SLURM's batch scripts, without SLURM. tests/cluster runs real jobs.

load helper

# bats test_tags=slow
@test "an edited copy, or a link, in a repository after make init: found from SLURM's copy" {
  mkdir -p "a repo/launch-kit" "a repo/jobs" spool
  ln -s -- "$ROOT/scripts" "a repo/launch-kit/scripts"
  # shellcheck disable=SC2016 # the tool expands it
  fake_tool scontrol 'printf "JobId=7\n   Command=%s a=1 --x\n   WorkDir=/\n" "$SUBMITTED"'
  local name submitted
  for name in slurm_train slurm_train_single_node; do
    cp -- "$ROOT/scripts/slurm/$name.sh" "a repo/mine.sh"
    ln -sf -- "../launch-kit/scripts/slurm/$name.sh" "a repo/jobs/link.sh"
    cp -- "$ROOT/scripts/slurm/$name.sh" "spool/slurm_script"
    for submitted in "$PWD/a repo/mine.sh" "$PWD/a repo/jobs/link.sh"; do
      SUBMITTED=$submitted SLURM_JOB_ID=7 run bash spool/slurm_script --version
      [[ $status == 0 && $output == "$name.sh "* ]]
    done
    cp -- "$ROOT/scripts/slurm/$name.sh" "a repo/jobs/mine.sh" # below the folder where sbatch ran
    SUBMITTED="$PWD/a repo/jobs/mine.sh" SLURM_SUBMIT_DIR="$PWD/a repo" run bash spool/slurm_script --version
    [[ $status == 0 && $output == "$name.sh "* ]]
    TRAIN_SCRIPT=x run "a repo/mine.sh" - --dry-run
    [[ $status == 0 && $output == *" sbatch '$PWD/a repo/mine.sh' -"* ]]
    TRAIN_SCRIPT=x run "a repo/jobs/link.sh" - --dry-run
    [[ $status == 0 && $output == *" sbatch $ROOT/scripts/slurm/$name.sh -"* ]]
  done
}

@test "submitted through a link: starts in what was typed, or says that the node lacks the folder" {
  mkdir -p real/launch-kit spool
  ln -s -- "$ROOT/scripts" real/launch-kit/scripts
  ln -s real typed
  fake_tool scontrol 'exit 1'
  local name here=$PWD
  for name in slurm_train slurm_train_single_node; do
    cp -- "$ROOT/scripts/slurm/$name.sh" spool/slurm_script
    cd /tmp # as SLURM does if the folder does not exist
    SLURM_SUBMIT_DIR=/behind TRAIN_SCRIPT=x run env PWD="$here/typed" bash "$here/spool/slurm_script" - --dry-run
    [[ $status == 0 && $output == *"sbatch"* && $output != *"[dir-not-shared]"* ]]
    SLURM_SUBMIT_DIR=/behind run env PWD=/behind bash "$here/spool/slurm_script"
    [[ $status == 3 && ${#lines[@]} == 1 ]]
    [[ $output == "$name.sh: "*": there is no folder /behind, where the job was submitted; "*" [dir-not-shared]" ]]
    cd -- "$here"
  done
}

@test "other scripts under sbatch also find the project, from any folder" {
  mkdir -p "a repo/launch-kit" spool
  ln -s -- "$ROOT/scripts" "a repo/launch-kit/scripts"
  # shellcheck disable=SC2016 # the tool expands it
  fake_tool scontrol '[ -n "$SUBMITTED" ] && printf "JobId=$1\n   Command=%s --x y.sh\n   WorkDir=/\n" "$SUBMITTED" "$SUBMITTED"'
  local script name
  for script in {launch,run_ddp,cluster_train,test_distributed} ssh/launch_{multinode,pdsh_multinode,singlenode,torchrun_auto,torchrun_multinode}; do
    name=${script#ssh/}.sh
    cp -- "$ROOT/scripts/$script.sh" spool/slurm_script
    ln -sf -- "launch-kit/scripts/$script.sh" "a repo/link.sh"
    SLURM_SUBMIT_DIR=$PWD/a\ repo run bash spool/slurm_script --version
    [[ $status == 0 && $output == "$name "* ]]
    SUBMITTED="$PWD/a repo/link.sh" SLURM_JOB_ID=7 SLURM_SUBMIT_DIR=$PWD run bash spool/slurm_script --version
    [[ $status == 0 && $output == "$name "* ]]
  done
}

@test "an edited copy of an old batch script: exit 2, and what to do" {
  sed 's/^run_command .*/parse_arguments config "$@"/' "$ROOT/scripts/slurm/slurm_train.sh" >mine.sh
  SLURM_SUBMIT_DIR=$ROOT run bash mine.sh plain.yaml
  [[ $status == 2 && $output == "mine.sh: this is a copy of an older script; copy the new one, and edit it again [config-invalid]" ]]
}

@test "both SLURM batch scripts find the project in the same way" {
  code_of() { sed -n '/^set -euo/,$p' "$ROOT/scripts/slurm/$1.sh" | sed 's/^KIT_NAME=[^ ]*//; s/^run_command [^ ]*//'; }
  [[ $(code_of slurm_train) == *"scontrol show job"* ]]
  diff <(code_of slurm_train) <(code_of slurm_train_single_node)
}

@test "a heterogeneous job: one line with one name" {
  SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST='n[1-2]' SLURM_HET_SIZE=2 run "$ROOT/scripts/slurm/slurm_train.sh" plain.yaml
  assert_refused 2 "a heterogeneous job has nodes that differ" wrong-world
}
