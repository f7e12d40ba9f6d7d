"""Open files: files in memory, waits for input, and the limit on how many files may be open."""

import contextlib
import errno
import os
import resource
import select
import tempfile
from collections.abc import Iterable

_MOST = 1 << 16  # enough for 7,000 nodes with 8 ranks; some containers have a limit of 2^30


def _read_limit() -> tuple[int, int]:
    """Return the soft and the hard limit; none if the system refuses to tell."""
    try:
        return resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError:
        return resource.RLIM_INFINITY, resource.RLIM_INFINITY


_given = _read_limit()  # with which this process, or the one it was forked from, started


def anonymous_file(name: str) -> int:
    """Return the descriptor of a new file, which nobody else can open by name.

    It is in memory, or in the folder for temporary files if the system has neither memory files nor
    /dev/shm. `name` is only shown in /proc. Raises OSError.
    """
    try:
        return os.memfd_create(name)
    except AttributeError:  # Pythons built for old systems, such as conda's
        pass
    except OSError as error:  # old kernels, sandboxes
        if error.errno == errno.EMFILE:
            raise
    with tempfile.TemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as file:
        return os.dup(file.fileno())


def wait_for_input(fds: Iterable[int], seconds: float | None = None) -> list[int]:
    """Wait until one can be read, or has been closed at the other end. Returns all such ones.

    The list is empty after `seconds`; None means no limit. Unlike select(), this accepts numbers
    above 1,023, which a process of a large run has.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if seconds is None else max(0.0, seconds) * 1000)]


def raise_limit(needed: int = _MOST) -> int:
    """Let this process open `needed` files, as far as its hard limit allows.

    Returns the limit that then applies; it is negative if there is none.
    """
    soft, hard = _read_limit()
    if 0 <= soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def give_back_limit() -> None:
    """Restore the limit with which this process, or the one that it was forked from, started."""
    with contextlib.suppress(OSError, ValueError):  # setrlimit raises either
        resource.setrlimit(resource.RLIMIT_NOFILE, _given)
