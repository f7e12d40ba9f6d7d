#!/usr/bin/env bash
# shellcheck disable=SC2034,SC2154 # PLAN is launch.sh's
# STAGE_ENV: run Python from a copy of its environment on each node's own memory or disk.
#
# usage: stage.sh ARCHIVE FOLDER [ARGS...]
#
# FOLDER/env/bin/python gets the ARGS. Where FOLDER is not there yet, it is unpacked from ARCHIVE:
# one file, which a shared file system reads faster than the thousands in it. ARCHIVE.facts has its
# BLAKE2 checksum and the bytes that it takes unpacked. launch.sh packs it, with zstd where there is
# one; this program runs on each node, before a Python can.

# --- where a run is launched --------------------------------------------------------------------

# Has the nodes run a copy of PYTHON, and packs its environment if it is new. The launcher runs from
# a copy only where one is there already: this may be a login node, and no node of the run.
stage_python() { # <fan-out or other task>
  local place=${STAGE_ENV:-} packed key folders facts archive copy end=.tar
  [[ -n $place && " auto local srun ssh pdsh " == *" $1 "* && " ${FLAGS[*]} " != *" --dry-run "* ]] || return 0
  [[ $place != 1 ]] || place=/dev/shm
  [[ $place == /* && ($1 != local || -d $place) ]] || # another machine may have it
    die 2 "STAGE_ENV is ${STAGE_ENV@Q}; give 1 for memory (/dev/shm), or a folder on each node's own disk"
  [[ -z ${CONTAINER:-} ]] ||
    die 2 "STAGE_ENV is for environments of many files, and CONTAINER is one; leave one of them out"
  packed=${PLAN["log-dir"]:-${LOG_DIR:-logs}}
  mkdir -p -- "$packed"
  packed=$(cd -- "$packed" && pwd)/environments-$UID
  make_own_folder "$packed"
  key=$(hash_of "$PYTHON $(readlink -f -- "$PYTHON")")
  folders=$packed/$key.folders
  [[ -s $folders ]] || find_folders "$PYTHON" >"$folders"
  facts=$(stat_folders "$folders")
  ! command -v zstd >/dev/null || end=.tar.zst
  archive=$packed/$key-$(hash_of "$facts")$end
  (
    hold "$packed/$key.lock" --exclusive # of several launches one packs
    [[ -r $archive ]] || pack_environment "$folders" "$archive" "$packed/$key-"
  )
  copy=$place/launch-kit-$UID/$(basename -- "$archive" "$end")
  PLAN[staged]=$archive
  PLAN[python]=$copy/env/bin/python
  [[ -d $copy ]] || return 0
  hold_unpacked "$archive" "$copy"
  PYTHON=${PLAN[python]}
}

hash_of() { # <text>
  local hash
  hash=$(b2sum <<<"$1")
  echo "${hash:0:16}"
}

# Prints the folders of a Python: the environment's, its Python's own, and those of its packages.
find_folders() { # <python>
  local folders
  folders=$("$1" -I -c 'import os, sys, sysconfig
conda = filter(os.path.isdir, [sys.prefix + "/conda-meta"])
print(sys.prefix, sys.base_prefix, sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *conda, sep="\n")')
  [[ $folders != /usr$'\n'* && $folders != /usr/local$'\n'* ]] ||
    die 2 "STAGE_ENV: $1 is the system's, which each node has; leave STAGE_ENV out, or set VENV or CONDA_ENV"
  echo "$folders"
}

# Prints what changes when a package is added, removed or replaced.
stat_folders() { # <file with the folders>
  local folders
  mapfile -t folders <"$1"
  stat -L -c '%n %Y %Z' -- "${folders[@]}"
}

pack_environment() { # <file with the folders> <archive> <beginning of the archives of this Python>
  local folders
  mapfile -t folders <"$1"
  echo "$PROGRAM: STAGE_ENV: packing ${folders[0]} into $2, once" >&2
  rm -f -- "$3"*
  [[ ! ${folders[1]} =~ ^(/usr|/usr/local|"${folders[0]}")$ ]] || unset "folders[1]"
  {
    tar -C "${folders[0]}/" --exclude=./pkgs --exclude=./envs --transform='s,^\.,env,S' -cf - . # conda's own
    [[ -z ${folders[1]:-} ]] || tar -C "${folders[1]}/" --transform='s,^\.,base,S' -cf - .
  } | coded "$2" -T0 >"$2.new"
  b2sum <"$2.new" >"$2.facts"
  du -cLsB1 -- "${folders[@]:0:2}" | tail -n 1 | cut -f 1 >>"$2.facts"
  mv -- "$2.new" "$2"
}

coded() { # <archive> <options of zstd...>
  if [[ $1 == *.zst ]]; then zstd -qc "${@:2}"; else cat; fi
}

# --- on each node -------------------------------------------------------------------------------

WAIT_S=280 # for another process to pack or unpack it
READERS=8  # of the archive, each of a part: a file server that is slow to answer has several to do
MIB=1048576

run_staged() { # <archive> <folder> <arguments...>
  hold_unpacked "$1" "$2"
  exec "$2/env/bin/python" "${@:3}"
}

# Unpacks the archive where it is not yet, and keeps the folder from removal as long as this process,
# or one that it becomes or starts, lives.
hold_unpacked() { # <archive> <folder>
  [[ -d ${2%/*/*} ]] || fail env-missing "there is no folder ${2%/*/*} here; give STAGE_ENV one that each node has"
  make_own_folder "${2%/*}"
  [[ -O ${1%/*} ]] || fail env-missing "there is no $1 of yours here; give a LOG_DIR that all nodes share, or leave STAGE_ENV out"
  hold "$2.lock" --shared
  until [[ -d $2 ]]; do
    hold "$2.lock" --exclusive
    [[ -d $2 ]] || unpack_environment "$1" "$2"
    hold "$2.lock" --shared
  done
}

hold() { # <file> <--shared|--exclusive>
  exec 9>>"$1"
  flock "$2" --wait "$WAIT_S" 9 ||
    fail env-missing "another process has held $1 for more than $WAIT_S s; see what hangs there"
}

# Nothing that another user could have put there is run.
make_own_folder() { # <folder>
  (umask 077 && mkdir -p -- "$1") || fail env-missing "$1 cannot be made, see above; see STAGE_ENV and LOG_DIR"
  [[ -O $1 && ! -L $1 ]] || fail env-missing "$1 is another user's; see STAGE_ENV and LOG_DIR"
}

unpack_environment() { # <archive> <folder>
  local new=$2.new facts python link
  [[ -r $1 ]] || fail env-missing "there is no $1 here; give a LOG_DIR that all nodes share, or leave STAGE_ENV out"
  [[ $1 != *.zst ]] || command -v zstd >/dev/null ||
    fail env-missing "there is no zstd here, to unpack $1; install it, or leave STAGE_ENV out"
  remove_unused "${2%/*}"
  mapfile -t facts <"$1.facts"
  ((facts[1] + $(stat -L -c %s -- "$1") < $(df --output=avail -B1 -- "${2%/*}" | tail -n 1))) ||
    fail disk-low "${2%/*} has no room for $((facts[1] / MIB)) MiB and their archive; give STAGE_ENV a folder that has"
  echo "stage.sh: ${HOSTNAME%%.*}: unpacking $1" >&2
  rm -rf -- "$new"
  mkdir -- "$new"
  if ! read_in_parts "$1" "$new/archive" || [[ $(b2sum <"$new/archive") != "${facts[0]}" ]] ||
    ! coded "$1" -d <"$new/archive" | tar -C "$new" --ignore-zeros --no-same-owner -xf -; then
    rm -rf -- "$new"
    fail env-missing "$1 cannot be unpacked, or is not whole, see above; remove it, and it is packed again"
  fi
  rm -- "$new/archive"
  if [[ -d $new/base ]]; then # a virtual environment's Python
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
  part=$((size / READERS / MIB + 1))
  for ((at = 0; at * MIB < size; at += part)); do
    dd if="$1" of="$2" bs=1M iflag=fullblock conv=notrunc skip="$at" seek="$at" count="$part" status=none &
    readers+=("$!")
  done
  for reader in "${readers[@]}"; do wait "$reader" || return; done
}

# Only one environment is kept for each user, but for those that a process runs from.
remove_unused() { # <folder of all>
  local other
  for other in "$1"/*/; do
    other=${other%/}
    [[ -d $other ]] || continue
    (
      if flock --nonblock 9; then rm -rf -- "$other"; fi
    ) 9>>"${other%.new}.lock"
  done
}

fail() { # <fault> <"cause; cure">
  local host
  host=$(uname -n)
  echo "stage.sh: ${host%%.*}: $2 [$1]" >&2
  exit 3
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  set -euo pipefail
  run_staged "$@"
fi
