# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# What every script stands on: where the project is, how it fails, how it explains itself.

ROOT=$(cd -P -- "${BASH_SOURCE[0]%/*}/../.." && pwd)
PROGRAM=${0##*/}
HOST=$(uname -n) # srun passes the batch host's HOSTNAME on
HOST=${HOST%%.*}

die() { # <exit code> <"cause; cure">
  printf '%s: %s\n' "$PROGRAM" "$2" >&2
  exit "$1"
}

refuse() { # <fault of TROUBLESHOOTING.md> <"cause; cure">
  die 3 "$HOST: $2 [$1]"
}

print_usage() {
  sed '1d; /^#/!Q; /^#[A-Z]/d; s/^# \{0,1\}//' "$0"
  echo
  [[ $(usage_line) != *" NODE..."* ]] || cat "$ROOT/scripts/lib/nodes.txt"
  cat "$ROOT/scripts/lib/help.txt"
}

usage_line() {
  sed -n 's/^# usage: //p' "$0"
}

# The only place where a list of arguments becomes a line for a shell.
quote_line() { # <argument...>
  local line
  printf -v line '%q ' "$@"
  printf '%s' "${line% }"
}
