"""The shared memory of torch's sharing strategy `file_system` (no torch).

Each tensor that a process shares is a file in /dev/shm. torch_shm_manager, a process that torch
starts, knows the files that are in use, and removes them 2 s after the last process that uses them
has ended. No process of a run may live for that long. So the process that ends a run reads the
names in the manager's memory, kills the manager, and removes the files itself. It cannot go by the
process ids in the names: another container may use the same /dev/shm, with the same ids.
"""

import contextlib
import os
import re

from launcher.proc import read_proc

_SHARED = re.compile(rb"/torch_\d+_\d+\w*")  # as for shm_open()
_SOCKET = re.compile(rb"/[^\0]+/torch-shm-dir-\w+/manager\.sock")
_MOST_BYTES = 1 << 26  # of one part of a manager's memory


def is_manager(pid: int) -> bool:
    """Whether a process is a torch_shm_manager."""
    return read_proc(pid, "comm") == b"torch_shm_manag\n"


def is_cleaner(pid: int) -> bool:
    """Whether a process removes the shared memory of others: Python's tracker, torch's manager."""
    tracker = b"from multiprocessing.resource_tracker import main"
    return tracker in read_proc(pid, "cmdline") or is_manager(pid)


def files_of(manager: int) -> set[str]:
    """Return the files that a manager would remove when it ends; none if we may not look."""
    found = set[str]()
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{manager}/mem", "rb", 0) as memory:
        for start, end in _writable_parts(manager):
            memory.seek(start)
            data = memory.read(min(end - start, _MOST_BYTES))
            found.update(f"/dev/shm{name.decode()}" for name in _SHARED.findall(data))
            found.update(map(os.fsdecode, _SOCKET.findall(data)))
    return found


def _writable_parts(pid: int) -> list[tuple[int, int]]:
    """Return the start and end addresses of a process's writable memory, without mapped files."""
    parts = []
    for line in read_proc(pid, "maps").splitlines():
        addresses, permissions, _, _, inode, *_ = line.split()
        if permissions.startswith(b"rw") and inode == b"0":  # not a file's
            start, end = addresses.split(b"-")
            parts.append((int(start, 16), int(end, 16)))
    return parts


def remove(files: set[str]) -> None:
    """Remove this user's files among these, and the folder of a manager's socket."""
    for path in files:
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid == os.geteuid():
                os.unlink(path)
        if path.endswith(".sock"):
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))
