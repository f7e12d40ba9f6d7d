#!/usr/bin/env bash
# Find what ended a run, or the first real cause in a log of any launcher; print a fault's section.
#
# usage: scripts/explain.sh [RUN|FILE|-|FAULT]...
#
#   RUN    a run of LOG_DIR (default: logs), by its id; without arguments: the newest
#   FILE   a log of any launcher, or the folder of a run; - reads standard input
#   FAULT  a name such as rank-stuck: its section of TROUBLESHOOTING.md
#
# example: scripts/explain.sh slurm-4711.out
#
# The exit code is 0 if a cause was found, 1 if there is none, 2 if a file cannot be read.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "$0")")/lib/launch.sh"
run_tool "$@"
