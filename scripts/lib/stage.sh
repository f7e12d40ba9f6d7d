#!/usr/bin/env bash
# STAGE_ENV: run Python from a copy of its environment on each node's own memory or disk.
#
# usage: stage.sh --pack PYTHON LOG_DIR
#        stage.sh ARCHIVE FOLDER [ARGS...]
#
# The first form packs the environment of PYTHON into one file below LOG_DIR, if it is new, with zstd
# where there is one, and prints its path: launcher/cli/stage.py. A shared file system reads it faster
# than the thousands of files in it. ARCHIVE.facts has its BLAKE2 checksum and the bytes that it takes
# unpacked.
# The second form runs on each node, before a Python can. FOLDER/env/bin/python gets the ARGS. Where
# FOLDER is not there yet, it is unpacked from ARCHIVE.
set -euo pipefail

# --- where a run is launched --------------------------------------------------------------------

pack() { # <python> <folder of logs>
  local packed key folders facts archive end=.tar
  mkdir -p -- "$2"
  packed=$(cd -- "$2" && pwd)/environments-$UID
  make_own_folder "$packed"
  key=$(hash_of "$1 $(readlink -f -- "$1")")
  folders=$packed/$key.folders
  [[ -s $folders ]] || find_folders "$1" >"$folders"
  facts=$(stat_folders "$folders")
  ! command -v zstd >/dev/null || end=.tar.zst
  archive=$packed/$key-$(hash_of "$facts")$end
  hold "$packed/$key.lock" --exclusive # of several launches one packs
  [[ -r $archive ]] || pack_environment "$folders" "$archive" "$packed/$key-"
  echo "$archive"
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
  if [[ $folders == /usr$'\n'* || $folders == /usr/local$'\n'* ]]; then
    echo "STAGE_ENV: $1 is the system's, which each node has; leave STAGE_ENV out, or set VENV or CONDA_ENV" >&2
    exit 2
  fi
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
  echo "STAGE_ENV: packing ${folders[0]} into $2, once" >&2
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

case $1 in
  --pack) pack "${@:2}" ;;
  *) run_staged "$@" ;;
esac
