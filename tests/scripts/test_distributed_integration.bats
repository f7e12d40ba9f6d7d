#!/usr/bin/env bats
# tests/cluster/selftest.bats runs the same script in a real job.
# shellcheck disable=SC2030,SC2031 # each test is a subshell, on purpose
bats_require_minimum_version 1.5.0
load helper

launch() {
  "$ROOT/scripts/test_distributed_integration.sh" "$@"
}

@test "--help and --dry-run" {
  run launch --help
  [[ $status == 0 && $output == *"usage: scripts/test_distributed_integration.sh [SALLOC OPTIONS]"* ]]
  run launch --dry-run --nodes=4 "--comment=a b"
  assert_output "'salloc' '--nodes=2' '--time=20' '--nodes=4' '--comment=a b' '$ROOT/scripts/test_distributed_integration.sh'"
}

@test "salloc gets the options; without it, without SLURM, and inside a job, they are refused" {
  run launch --nodes=4
  assert_refused 3 "salloc is not installed here; use a login node, or test_distributed.sh" env-missing
  SLURM_JOB_ID=7 run launch --nodes=4
  assert_refused 2 "--nodes=4: this job already has its size; omit the options"
  fake_tool salloc 'printf "%s\n" "$@"'
  fake_tool sinfo 'exit 1'
  run launch --nodes=4
  assert_refused 3 "sinfo failed (see above); run this script where sinfo works" env-missing
  fake_tool sinfo ''
  run launch --nodes=4 "--comment=a b"
  assert_output $'--nodes=2\n--time=20\n--nodes=4\n--comment=a b\n'"$ROOT/scripts/test_distributed_integration.sh"
}
