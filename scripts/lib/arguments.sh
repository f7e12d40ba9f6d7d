# shellcheck shell=bash
# One grammar for every script: positional arguments, key=value settings, --options, and after
# `--` what goes to the training script untouched. It fills what launch.sh declares.

# The positional arguments go into PLAN under the names given, in that order.
parse_arguments() { # <"plan entry ..."> <argument...>
  local names
  read -ra names <<<"$1"
  shift
  TYPED=("$0" "$@")
  while (($#)); do
    [[ $1 == --*=* ]] && set -- "${1%%=*}" "${1#*=}" "${@:2}"
    case $1 in
      -h | --help) print_usage && exit ;;
      --dry-run | --strict | --detach) FLAGS+=("$1") ;;
      --) REST=("${@:2}") && break ;;
      -?*)
        take_option "$@"
        [[ ${OPTIONS[$1]} == !* ]] || shift
        ;;
      *) take_argument "$1" ;;
    esac
    shift
  done
}

take_option() { # <option> [<value>] ...
  [[ -n ${OPTIONS[$1]:-} ]] ||
    die 2 "unknown option ${1@Q}; see $PROGRAM --help, and put the training script's own after --"
  if [[ ${OPTIONS[$1]} == !* ]]; then
    FLAGS+=("--${OPTIONS[$1]#!}")
  else
    (($# > 1)) || die 2 "option $1 has no value; see $PROGRAM --help"
    PLAN[${OPTIONS[$1]}]=$2
  fi
}

# Takes the next of parse_arguments' names.
take_argument() { # <argument>
  if [[ $1 =~ ^[A-Za-z_+~][A-Za-z0-9_.+-]*= && ! -e $1 ]]; then
    SETTINGS+=("$1")
  elif [[ ${names[0]:-} == nodes... ]]; then
    NODES+=("$1")
  else
    ((${#names[@]})) || die 2 "one argument too many, ${1@Q}; see $PROGRAM --help"
    # shellcheck disable=SC2004 # a name, not arithmetic
    PLAN[${names[0]}]=$1
    names=("${names[@]:1}")
  fi
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
