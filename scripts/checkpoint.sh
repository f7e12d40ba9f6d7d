#!/usr/bin/env bash
# List, verify, export and compare checkpoints.
#
# usage: scripts/checkpoint.sh ls DIR | verify DIR | export DIR FILE | hash DIR
#
#   ls DIR           list the checkpoints of a run: steps, sizes, losses
#   verify DIR       read them, and compare every byte with their manifests
#   export DIR FILE  write only the weights, for torch.load; for other programs, FILE.safetensors
#   hash DIR         print one SHA-256 over the weights
#   DIR              a checkpoint, or the folder of a run, which means its newest intact one
#
# example: scripts/checkpoint.sh verify checkpoints/RUN_ID
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "$0")")/lib/launch.sh"
run_tool "$@"
