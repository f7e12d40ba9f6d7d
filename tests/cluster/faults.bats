#!/usr/bin/env bats
# Some faults of bench/fault_rows.py; make prove causes all of them, and times them.
load helper

ROOT=$(cd -- "$BATS_TEST_DIRNAME/../.." && pwd -P)

@test "faults before the start, in a run and in a job are named, with host and exit code" {
  export PREFLIGHT_SECONDS=20 # a busy machine may need more than the usual 9 for four nodes
  cd -- "$ROOT"
  PYTHONPATH=bench "$PYTHON" bench/faults.py --skip-torchrun --untimed port-blocked link-lost wrong-world
}
