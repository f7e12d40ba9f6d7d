#!/usr/bin/env bats
# Scripts modelled on public ones behave under every launcher as they do under torchrun.

# bats file_tags=prove,long
bats_require_minimum_version 1.5.0
load helper

ROOT=$(cd -- "$BATS_TEST_DIRNAME/../.." && pwd -P)

@test "scripts modelled on public ones do as under torchrun: on one machine, over ssh and under SLURM" {
  "$PYTHON" "$ROOT/bench/shapes.py" --check
}
