#!/usr/bin/env bats
# The cluster's own settings: config/site.env, and SITE.
# shellcheck disable=SC2030,SC2031,SC2154 # each test is a subshell, on purpose; set by run
bats_require_minimum_version 1.5.0
load helper

launch() {
  "$ROOT/scripts/ssh/launch_singlenode.sh" "$@"
}

assert_site_refused() { # <text>
  SITE=site.env run launch plain.yaml 1
  assert_refused 2 "launch_singlenode.sh: $1"
}

@test "a site file sets what the user has not set, and the plan names the file" {
  cat >site.env <<'SITE'
# Our cluster.
NPROC_PER_NODE=3
export NCCL_DEBUG="VERSION WARN"

GRACE='7'
SITE
  GRACE=9 SITE=site.env run --separate-stderr launch plain.yaml --dry-run
  [[ $status == 0 && $stderr == *$'\nsite       site.env sets NPROC_PER_NODE NCCL_DEBUG\n'* ]]
  [[ $output == *"--nproc-per-node 3"* ]]
}

# bats test_tags=slow
@test "a site file written on Windows" {
  printf '\xef\xbb\xbfNPROC_PER_NODE=3\r\n\r\nGRACE="7"\r\n' >site.env
  SITE=site.env run --separate-stderr launch plain.yaml --dry-run
  [[ $status == 0 && $stderr == *$'\nsite       site.env sets NPROC_PER_NODE GRACE\n'* ]]
  [[ $output == *"--nproc-per-node 3"* && $output != *$'\r'* ]]
}

@test "a line that is no setting is refused with its number; so is a missing file, or a folder" {
  printf 'A=1\nmodule load cuda\n' >site.env
  assert_site_refused "site.env, line 2: 'module load cuda' sets nothing; write NAME=VALUE [config-invalid]"
  rm site.env
  mkdir site.env
  assert_site_refused "SITE names 'site.env', which cannot be read; correct its path [config-invalid]"
  rmdir site.env
  assert_site_refused "SITE names 'site.env', which cannot be read; correct its path"
}

@test "nothing of a site file is executed" {
  # shellcheck disable=SC2016 # not expanded
  printf 'A=$(touch gone)\nB=`touch gone`; touch gone\n' >site.env
  SITE=site.env run launch plain.yaml 1 --dry-run
  [[ $status == 0 && ! -e gone ]]
}
