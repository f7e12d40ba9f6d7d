# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# What every script stands on: where the project is, how it fails, how it explains itself.
# The script that sources this has set ROOT (see any of them: it also finds the project from a
# copy in a scheduler's spool folder).

ROOT=$(cd -- "$ROOT" && pwd -P)
PROGRAM=${0##*/}
HOST=${HOSTNAME%%.*}

die() { # <exit code> <"cause; cure">
  printf '%s: %s\n' "$PROGRAM" "$2" >&2
  exit "$1"
}

refuse() { # <fault of TROUBLESHOOTING.md> <"cause; cure">
  die 3 "$HOST: $2 [$1]"
}

print_usage() {
  awk 'NR > 1 { if (!/^#/) exit; if (sub(/^# /, "") || sub(/^#$/, "")) print }' "$0"
  echo
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
