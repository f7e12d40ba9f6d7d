# shellcheck shell=bash disable=SC2154 # of launch.sh
# Finds the Python that runs the job: environment modules, conda, virtual environments.

# Sets PYTHON to an absolute path, and KIT_ACTIVATED.
choose_python() {
  local name
  local -A KIT_BEFORE=() # `before` may be exported
  [[ -z ${PYTHON:-} ]] || type -P -- "$PYTHON" >/dev/null ||
    ! ignore_foreign PYTHON "which is not a program" || PYTHON=''
  [[ -z ${VENV:-} || -d $VENV ]] || ! ignore_foreign VENV "which is not a folder" || VENV=''
  [[ -z ${CONDA_ENV:-} ]] || type -P -- "${CONDA_EXE:-conda}" >/dev/null ||
    ! ignore_foreign CONDA_ENV "and this machine has no conda" || CONDA_ENV=''
  for name in $(compgen -A export); do KIT_BEFORE[$name]=${!name}; done
  [[ ${MODULES:-none} == [Nn]one ]] || load_modules
  [[ -n ${PYTHON:-} ]] || find_python
  check_python
  for name in $(compgen -A export); do
    [[ ${KIT_BEFORE[$name]-unset} == "${!name}" ]] || KIT_ACTIVATED+=("$name")
  done
}

# Sets PYTHON to the first of VENV, CONDA_ENV, LAUNCH_PYTHON, the active environment, .venv, the
# environment in which pip installed us, python3.
find_python() {
  if [[ -n ${VENV:-} ]]; then
    use_folder VENV
  elif [[ -n ${CONDA_ENV:-} ]]; then
    activate_conda
  elif [[ -n ${LAUNCH_PYTHON:-} ]]; then # a command that pip installed
    PYTHON=$LAUNCH_PYTHON
  elif ! use_active; then
    PYTHON=$KIT_ROOT/.venv/bin/python
    [[ -x $PYTHON || $KIT_ROOT != */site-packages/* ]] ||
      PYTHON=${KIT_ROOT%/lib*/python*}/bin/python
    [[ -x $PYTHON ]] || PYTHON=python3
  fi
}

check_python() { # and make it an absolute path
  local found code=0
  local check='import sys, zlib; sys.exit(42 if sys.version_info >= (3, 10) else 43)'
  found=$(type -P -- "$PYTHON") ||
    refuse "there is no Python at ${PYTHON@Q}$(name_target "$PYTHON");" \
      "set PYTHON to Python 3.10 or newer"
  [[ $found == /* ]] || found=$PWD/$found
  PYTHON=$(as_typed "$found" "$PWD" "$KIT_ROOT")

  unset PYTHONINSPECT # if it is set, each process waits for input before it exits
  "$PYTHON" -S -c "$check" 2>/dev/null || code=$?
  case $code:${PYTHONHOME:-} in
    42:*) ;;
    43:*) refuse "$PYTHON is older than Python 3.10; set PYTHON to a newer one" ;;
    "$code:") refuse "$PYTHON is not a Python interpreter; fix PYTHON" ;;
    *) refuse "PYTHONHOME=$PYTHONHOME does not match $PYTHON; unset it" ;;
  esac
}

# In launch.sh, which replaces torchrun, a value that we cannot use belongs to another program.
ignore_foreign() { # <variable> <"why">
  [[ $KIT_NAME == launch.sh && ${!1} != */* ]] || return 1
  echo "$KIT_NAME: warning: $1 is ${!1@Q}, $2; ignored" >&2
}

# If CONTAINER is set, PYTHON and VENV are paths inside it. The launcher uses this machine's Python.
choose_inside() {
  is_image "${CONTAINER:-}" || ! ignore_foreign CONTAINER "which is not an image" || CONTAINER=''
  [[ -n ${CONTAINER:-} ]] || return 0
  KIT_INSIDE=${PYTHON:-${VENV:+$VENV/bin/}python3}
  PYTHON='' VENV='' CONDA_ENV=''
}

is_image() { # <CONTAINER> as launcher/container.py interprets it; pyxis loads images by name
  case $1 in
    '' | podman:* | .* | */* | *.sif | *.sqsh) ;;
    docker | podman | oci | lxc | singularity | apptainer | [Tt]rue | [Yy]es | [0-9]) return 1 ;;
    *) [[ -d $1 || -n ${SLURM_JOB_ID:-} ]] ;;
  esac
}

# Uses the active environment, if there is one. If VIRTUAL_ENV or CONDA_PREFIX disagrees with PATH,
# as in an editor's terminal, PATH wins, as for torchrun, unless only the former has torch.
use_active() {
  local name first named=()
  first=$(type -P python || type -P python3) || first=/
  for name in VIRTUAL_ENV CONDA_PREFIX; do
    [[ -n ${!name:-} && ($name == VIRTUAL_ENV || ${CONDA_DEFAULT_ENV:-base} != base) ]] || continue
    if [[ ${first%/*} -ef ${!name}/bin || $(prefix_of "$first") -ef ${!name} ]]; then
      use_folder "$name" && return
    fi
    named+=("$name")
  done
  ((${#named[@]})) || return 1

  if has_torch "$first"; then
    PYTHON=$first
    echo "$KIT_NAME: warning: ${named[0]} is ${!named[0]@Q}, but PATH leads to $first, which is" \
      "used; to use another, set VENV" >&2
    return
  fi

  for name in "${named[@]}"; do
    [[ ! -x ${!name}/bin/python ]] || { use_folder "$name" && return; }
  done
  echo "$KIT_NAME: warning: ${named[0]} is ${!named[0]@Q}, which has no bin/python; ignored" >&2
  return 1
}

prefix_of() { # <python, or a script that starts it, as pyenv's>
  "$1" -I -c 'import sys; print(sys.prefix)' 2>/dev/null
}

has_torch() { # <python>; a torch.py in the working directory does not count
  "$1" -c 'import sys; sys.path = [p for p in sys.path if p]; import importlib.util
sys.exit(not importlib.util.find_spec("torch"))' 2>/dev/null
}

use_folder() { # <variable that names an environment's folder>
  local folder=${!1}
  PYTHON=$folder/bin/python
  [[ -x $PYTHON ]] || refuse \
    "$1 names ${folder@Q}, which has no bin/python$(name_target "$PYTHON"); correct $1"
  PATH=$(cd -- "$folder/bin" && pwd):$PATH
}

# An environment's Python is a link, often into its creator's home, or to a disk of one machine.
name_target() { # <a file that is missing, or not executable>
  [[ ! -L $1 ]] || echo " (a link to $(readlink -m -- "$1"), which" \
    "$(id -un 2>/dev/null || id -u) cannot run here)"
}

activate_conda() {
  local conda file
  conda=${CONDA_EXE:-$(type -P conda)} ||
    refuse "CONDA_ENV is set but there is no conda on PATH; set CONDA_EXE"
  file=${conda%/*/*}/etc/profile.d/conda.sh
  [[ -r $file ]] || refuse "there is no ${file@Q}; set CONDA_EXE"

  set +eu # conda's scripts, and the hooks of packages, read unset variables and let commands fail
  source "$file"
  conda activate "$CONDA_ENV" >&2 ||
    refuse "conda cannot activate ${CONDA_ENV@Q}; see conda env list"
  set -eu
  PYTHON=python
}

load_modules() {
  local file names
  set +eu # the module system's scripts need this, as conda's do
  for file in "$LMOD_PKG/init/bash" "$MODULESHOME/init/bash" /etc/profile.d/{lmod,modules}.sh; do
    declare -F module >/dev/null && break
    [[ ! -r $file ]] || source "$file"
  done

  if ! declare -F module >/dev/null; then
    set -eu
    ignore_foreign MODULES "and this machine has no module command" && unset MODULES && return
    refuse "MODULES is set but this machine has no module command; unset MODULES"
  fi
  read -ra names <<<"$MODULES"
  module load "${names[@]}" || refuse "module load $MODULES failed; see module avail"
  set -eu
}
