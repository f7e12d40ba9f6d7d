# shellcheck shell=bash disable=SC2034
# One grammar for every script: positional arguments, key=value settings, --options, and after
# `--` what goes to the training script untouched. It fills what launch.sh declares.

# The positional arguments go into PLAN under the names given, in that order. At "program..." the
# training script begins, and all that follows is its own.
parse_arguments() { # <"plan entry ..."> <argument...>
  local names
  read -ra names <<<"$1"
  shift
  TYPED=("${LAUNCH_AS:-$0}" "$@")                    # a command that pip has installed has its own name
  [[ ${TYPED[0]} == */* ]] || TYPED[0]=./${TYPED[0]} # bash launch.sh
  unset LAUNCH_AS
  while (($#)); do
    [[ $1 == --*=* ]] && set -- "${1%%=*}" "${1#*=}" "${@:2}"
    [[ $1 == -[!-]?* && ${OPTIONS[${1:0:2}]:-!} != !* ]] && set -- "${1:0:2}" "${1:2}" "${@:2}" # -r3
    case $1 in
      -h | --help) print_usage && exit ;;
      --version) echo "$PROGRAM $(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$ROOT/distributed/__init__.py")" && exit ;;
      --dry-run | --strict) FLAGS+=("$1") ;;
      --detach) refuse_scheduled "$1" && FLAGS+=("$1") ;;
      --status | --stop | --stacks) answer_about_runs "$@" ;;
      --) REST=("${@:2}") && break ;;
      --show)
        (($# > 1)) || die 2 "option $1 has no value; give all, or 0"
        export SHOW_RANKS=$2
        shift
        ;;
      -?*)
        set -- "$(full_option "$1")" "${@:2}"
        take_option "$@"
        [[ ${OPTIONS[$1]} == !* ]] || shift
        ;;
      *)
        [[ ${names[0]:-} == program... ]] && REST=("$@") && break
        take_argument "$1"
        ;;
    esac
    shift
  done
}

# Prints the option that a word stands for. As torchrun's, it may be shortened, and have _ for -.
full_option() { # <word>
  local word=$1 option found=()
  [[ -n ${OPTIONS[$word]:-} ]] || word=${1//_/-}
  for option in "${!OPTIONS[@]}"; do
    [[ $word != --?* || $option != "$word"* ]] || found+=("$option")
  done
  [[ -n ${OPTIONS[$word]:-} || ${#found[@]} != 1 ]] || word=${found[0]}
  printf '%s\n' "$word"
}

take_option() { # <option> [<value>] ...
  local own=--
  [[ ${names[*]} != *program... ]] || own='its name'
  [[ -n ${OPTIONS[$1]:-} ]] ||
    die 2 "unknown option ${1@Q}; see $PROGRAM --help, and put the training script's own after $own"
  [[ ${OPTIONS[$1]} == !* ]] || (($# > 1)) || die 2 "option $1 has no value; see $PROGRAM --help"
  case ${OPTIONS[$1]} in
    !@) PASSED+=("$1") ;;
    @) PASSED+=("$1" "$2") ;;
    !*) FLAGS+=("--${OPTIONS[$1]#!}") ;;
    *) PLAN[${OPTIONS[$1]}]=$2 ;;
  esac
}

# In any language, [a-z] are the letters of C.
matches() { # <text> <regular expression>
  local LC_ALL=C
  [[ $1 =~ $2 ]]
}

# Takes the next of parse_arguments' names.
take_argument() { # <argument>
  if matches "$1" '^[A-Za-z_+~][A-Za-z0-9_.+-]*=' && [[ ! -e $1 ]]; then
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

# A scheduler does it itself.
refuse_scheduled() { # <option>
  [[ -z $SCHEDULED ]] ||
    die 2 "$1 is for runs that no scheduler holds; use sbatch, squeue and scancel (PBS: qsub, qstat and qdel)"
}

# Does not return.
answer_about_runs() { # <--status|--stop|--stacks> [<run id>...]
  local word
  [[ $1 == --stacks ]] || refuse_scheduled "$1"
  for word in "${FLAGS[@]}" "${@:2}"; do
    case $word in
      --dry-run) FLAGS=("$word") ;;
      -*) die 2 "$word does not go with $1; give the names of runs" ;;
      *) REST+=("$word") ;;
    esac
  done
  launch "${1#--}"
}

print_header() {
  sed '1d; /^#/!Q; /^#[A-Z]/d; s/^# \{0,1\}//' "$0"
}

print_usage() {
  print_header
  echo
  [[ $(usage_line) != *" NODE..."* ]] || cat "$ROOT/scripts/lib/nodes.txt"
  cat "$ROOT/scripts/lib/help.txt"
}

usage_line() {
  sed -n 's/^# usage: //p' "$0"
}
