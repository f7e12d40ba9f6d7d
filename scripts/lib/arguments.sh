# shellcheck shell=bash disable=SC2034,SC2154 # the files of lib/ share their variables
# One grammar for every script: positional arguments, key=value settings, --options, and after
# `--` what goes to the training script untouched.

declare -A plan=()    # what the user said and what was made of it; plan.sh completes it
declare -A OPTIONS=() # the script's own options, each with the plan entry its value goes to
NODES=()              # where there may be any number, under the name "nodes..."
SETTINGS=()           # key=value, in order
REST=()               # what follows `--`
LAUNCH_LINE=()        # all of it, as it was typed
DRY_RUN=
STRICT=
DETACH=

# Fills plan[NAME] for each positional argument, in the order of the names given.
parse_arguments() { # <"plan entry ..."> <argument...>
  local names
  read -ra names <<<"$1"
  shift
  LAUNCH_LINE=("$0" "$@")
  while (($#)); do
    [[ $1 == --*=* ]] && set -- "${1%%=*}" "${1#*=}" "${@:2}"
    case $1 in
      -h | --help) print_usage && exit ;;
      --dry-run) DRY_RUN=1 ;;
      --strict) STRICT=1 ;;
      --detach) DETACH=1 ;;
      --status) print_status "${@:2}" && exit ;;
      --stop) stop_run "${@:2}" && exit ;;
      --) REST=("${@:2}") && break ;;
      -?*)
        [[ -n ${OPTIONS[$1]:-} ]] ||
          die 2 "unknown option ${1@Q}; see $PROGRAM --help, and put the training script's own after --"
        if [[ ${OPTIONS[$1]} == !* ]]; then # needs no value
          plan[${OPTIONS[$1]#!}]=1
        else
          (($# > 1)) || die 2 "option $1 has no value; see $PROGRAM --help"
          plan[${OPTIONS[$1]}]=$2
          shift
        fi
        ;;
      *)
        if [[ $1 =~ ^[A-Za-z_+~][A-Za-z0-9_.+-]*= && ! -e $1 ]]; then
          SETTINGS+=("$1")
        elif [[ ${names[0]:-} == nodes... ]]; then
          NODES+=("$1")
        else
          ((${#names[@]})) || die 2 "one argument too many, ${1@Q}; see $PROGRAM --help"
          plan[${names[0]}]=$1
          names=("${names[@]:1}")
        fi
        ;;
    esac
    shift
  done
  if [[ -n $DETACH && -z $DRY_RUN && -z ${LAUNCHER_RECORD:-} ]]; then detach && exit; fi
}
