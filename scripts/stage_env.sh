#!/usr/bin/env bash
# Create a Python that runs from a copy of its environment on each node, and print its path.
#
# usage: scripts/stage_env.sh [FOLDER]
#
#   FOLDER   where the copy goes on each node (default: /dev/shm, the node's memory)
#
# It packs the environment that the launchers would use into a file in LOG_DIR, if it changed.
#
# example: PYTHON=$( scripts/stage_env.sh ) sbatch scripts/slurm/slurm_train.sh config/local3.yaml
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh cannot run this
set -euo pipefail

main() { # [<folder>]
  source "$(dirname -- "$(readlink -f -- "$0")")/lib/launch.sh"
  answer "${1:-}" ''
  local folder=${1-/dev/shm}
  [[ $# -le 1 && $folder == /* ]] || die 2 "FOLDER is ${*@Q};" \
    "give one absolute path, of a folder that each node has [config-invalid]"
  [[ -z ${CONTAINER:-} ]] || die 2 "CONTAINER is set, so there is no environment to copy;" \
    "unset CONTAINER [config-invalid]"
  read_site
  choose_python
  pack "$PYTHON" "${LOG_DIR:-logs}" "$folder"
}

# ARCHIVE.facts has the archive's BLAKE2 checksum, and its unpacked size in bytes.
pack() { # <python> <folder of logs> <folder on the nodes>
  local packed key folders facts archive end=.tar
  mkdir -p -- "$2"
  packed=$(cd -- "$2" && pwd)/environments-$UID
  [[ $1 != "$packed"/* ]] || die 2 "PYTHON is already a staged copy;" \
    "unset it, or set it to the environment's own [config-invalid]"
  make_own_folder "$packed"
  key=$(hash_of "$1 $(readlink -f -- "$1") $3")
  folders=$packed/$key.folders
  [[ -s $folders ]] || find_folders "$1" >"$folders"
  facts=$(xargs -d '\n' stat -L -c '%n %Y %Z' -- <"$folders") # a change of packages changes them
  ! command -v zstd >/dev/null || end=.tar.zst
  archive=$packed/$key-$(hash_of "$facts")$end
  hold "$packed/$key.lock" --exclusive # only one of several launches packs
  [[ -r $archive ]] || pack_environment "$folders" "$archive" "$packed/$key-"
  archive=${archive%.tar*} key=$packed/$key.python
  printf '#!/usr/bin/env bash\nexec bash %q/scripts/stage_env.sh --run %q %q %q "$@"\n' \
    "$KIT_ROOT" "$archive$end" "$3/launch-kit-$UID/${archive##*/}" "$1" >"$key.new"
  chmod +x -- "$key.new" && mv -- "$key.new" "$key"
  echo "$key"
}

hash_of() { b2sum <<<"$1" | cut -c -16; } # <text>

# Prints the folders of a Python: the environment's, its base Python's, and those of its packages.
find_folders() { # <python>
  local folders
  folders=$("$1" -I -c 'import os, sys, sysconfig
packages = map(sysconfig.get_path, ("purelib", "platlib"))
conda = filter(os.path.isdir, [sys.prefix + "/conda-meta"])
print(sys.prefix, sys.base_prefix, *packages, *conda, sep="\n")')
  [[ $folders != /usr$'\n'* && $folders != /usr/local$'\n'* ]] ||
    die 2 "$1 is the system's Python, which is not copied;" \
      "set PYTHON, VENV or CONDA_ENV to an environment [env-missing]"
  echo "$folders"
}

pack_environment() { # <file with the folders> <archive> <beginning of the archives of this Python>
  local folders
  mapfile -t folders <"$1"
  echo "stage_env.sh: packing ${folders[0]} into $2, once" >&2
  rm -f -- "$3"*
  [[ ! ${folders[1]} =~ ^(/usr|/usr/local|"${folders[0]}")$ ]] || unset "folders[1]"
  { # pkgs and envs are conda's other folders
    tar -C "${folders[0]}/" --exclude=./pkgs --exclude=./envs --transform='s,^\.,env,S' -cf - .
    [[ -z ${folders[1]:-} ]] || tar -C "${folders[1]}/" --transform='s,^\.,base,S' -cf - .
  } | coded "$2" -T0 >"$2.new"
  b2sum <"$2.new" >"$2.facts"
  du -cLsB1 -- "${folders[@]:0:2}" | tail -n 1 | cut -f 1 >>"$2.facts"
  mv -- "$2.new" "$2"
}

KIT_WAIT_S=280 # for another process to pack or unpack the environment
KIT_READERS=8  # each reads a part of the archive: a slow file server serves several at once
KIT_MIB=1048576

run_staged() { # <archive> <folder> <python> <argument...>
  # Only these commands, on the nodes, unpack the archive. A machine that only launches need not.
  case "${*:4:2} " in
    */scripts/lib/agent.py\ * | */scripts/lib/start.py\ launcher.[fp]* | -u\ *) ;;
    *) [[ -d $2 ]] || exec "$3" "${@:4}" ;;
  esac
  hold_unpacked "$1" "$2"
  exec "$2/env/bin/python" "${@:4}"
}

# <archive> <options of zstd...>
coded() { if [[ $1 == *.zst ]]; then zstd -qc "${@:2}"; else cat; fi; }

# Unpacks the archive if it is not unpacked yet, and protects the folder from removal while this
# process, or one that it becomes or starts, is alive.
hold_unpacked() { # <archive> <folder>
  [[ -d ${2%/*/*} ]] ||
    fail env-missing "there is no folder ${2%/*/*} here; give stage_env.sh one that each node has"
  make_own_folder "${2%/*}"
  [[ -O ${1%/*} ]] || fail env-missing "$1 does not exist here, or belongs to another user;" \
    "give a LOG_DIR that all nodes share, or another PYTHON"

  hold "$2.lock" --shared
  until [[ -d $2 ]]; do
    hold "$2.lock" --exclusive
    [[ -d $2 ]] || unpack_environment "$1" "$2"
    hold "$2.lock" --shared
  done
}

hold() { # <file> <--shared|--exclusive>
  exec 9>>"$1"
  flock "$2" --wait "$KIT_WAIT_S" 9 ||
    fail env-missing "another process has held $1 for more than $KIT_WAIT_S s; find out why"
}

# Creates a folder that belongs to this user, so that no other user's programs are run from it.
make_own_folder() { # <folder>
  local cure="give another LOG_DIR or FOLDER"
  (umask 077 && mkdir -p -- "$1") || fail env-missing "cannot create $1, see above; $cure"
  [[ -O $1 && ! -L $1 ]] || fail env-missing "$1 belongs to another user; $cure"
}

unpack_environment() { # <archive> <folder>
  local new=$2.new facts python link
  [[ -r $1 ]] || fail env-missing "there is no $1 here;" \
    "run stage_env.sh again, with a LOG_DIR that all nodes share"
  [[ $1 != *.zst ]] || command -v zstd >/dev/null ||
    fail env-missing "unpacking $1 needs zstd, which is not installed here;" \
      "install it, or set PYTHON to the environment's own"
  remove_unused "${2%/*}"
  mapfile -t facts <"$1.facts"
  ((facts[1] + $(stat -L -c %s -- "$1") < $(df --output=avail -B1 -- "${2%/*}" | tail -n 1))) ||
    fail disk-low "${2%/*} has no room for $((facts[1] / KIT_MIB)) MiB and the archive;" \
      "give stage_env.sh a folder with more space"
  echo "stage_env.sh: $(uname -n | cut -d . -f 1): unpacking $1" >&2
  rm -rf -- "$new"
  mkdir -- "$new"
  if ! read_in_parts "$1" "$new/archive" || [[ $(b2sum <"$new/archive") != "${facts[0]}" ]] ||
    ! coded "$1" -d <"$new/archive" | tar -C "$new" --ignore-zeros --no-same-owner -xf -; then
    rm -rf -- "$new"
    fail env-missing "$1 cannot be unpacked or is incomplete (see above);" \
      "remove it and run stage_env.sh again"
  fi
  rm -- "$new/archive"

  if [[ -d $new/base ]]; then # the Python of a virtual environment
    python=$(basename -- "$(readlink -f -- "$new/base/bin/python3")")
    for link in "$new"/env/bin/python*; do
      [[ $(readlink -- "$link") != /* ]] || ln -sfn -- "../../base/bin/$python" "$link"
    done
    sed -i "s|^home = .*|home = $2/base/bin|" "$new/env/pyvenv.cfg"
  fi
  mv -T -- "$new" "$2"
}

read_in_parts() { # <file> <its copy>
  local size part at reader readers=()
  size=$(stat -L -c %s -- "$1")
  part=$((size / KIT_READERS / KIT_MIB + 1))
  for ((at = 0; at * KIT_MIB < size; at += part)); do
    dd if="$1" of="$2" bs=1M skip="$at" seek="$at" count="$part" \
      iflag=fullblock conv=notrunc status=none &
    readers+=("$!")
  done
  for reader in "${readers[@]}"; do wait "$reader" || return; done
}

# Keeps only one environment for each user, and those that a process is running from.
remove_unused() { # <folder of all environments>
  local other
  for other in "$1"/*/; do
    other=${other%/}
    [[ ! -d $other ]] || (! flock --nonblock 9 || rm -rf -- "$other") 9>>"${other%.new}.lock"
  done
}

fail() { # <fault> <"cause; cure", in one word or more>
  echo "stage_env.sh: $(uname -n | cut -d . -f 1): ${*:2} [$1]" >&2
  exit 3
}

[[ ${1:-} != --run ]] || run_staged "${@:2}"
main "$@"
