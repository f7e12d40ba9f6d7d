#!/usr/bin/env bash
# Copy this project into your own repository, as one folder in it (make init DIR=...).
set -euo pipefail

ROOT=$(CDPATH='' cd -P -- "$(dirname -- "$0")/../.." && pwd)
PARTS=(scripts launcher distributed training config examples docs bench/{README,proofs}.md LICENSE
  {README,LAUNCH_GUIDE,TROUBLESHOOTING,SECURITY,CONTRIBUTING,CHANGELOG}.md
  train.py requirements.txt pyproject.toml)

die() { # <"cause; cure">
  echo "make init: $1" >&2
  exit 2
}

main() { # <repository>
  local folder=$1/launch-kit why
  [[ -n $1 ]] || die "DIR is not set; run make init DIR=YOUR_REPOSITORY"
  [[ -d $1 ]] || die "there is no folder ${1@Q}; correct DIR"
  [[ ! -e $folder ]] || die "${folder@Q} exists; nothing was changed. Remove it to start again"
  why=$(mkdir -- "$folder" 2>&1) || die "${why#mkdir: }; nothing was changed"
  tar -C "$ROOT" --exclude=__pycache__ -cf - "${PARTS[@]}" | tar -C "$folder" -xf -
  echo "copied to $folder; nothing else was changed. For example:"
  echo "  cd ${1@Q} && launch-kit/scripts/launch.sh --nproc-per-node 2 YOUR_SCRIPT.py"
}
main "$@"
