"""A folder seen through a file system that takes MS milliseconds for each operation:

python bench/slow_files.py FOLDER MOUNT_POINT MS          (as root; needs mfusepy and libfuse3)

As with a file server, the kernel keeps names and attributes for a second, and what it has read.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from mfusepy import FUSE, Operations

STAT = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size")
ROOT, MOUNT_POINT, DELAY_S = os.path.realpath(sys.argv[1]), sys.argv[2], float(sys.argv[3]) / 1000


def late(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation that takes its time."""

    def operation(self: SlowFiles, path: str, *arguments: Any) -> Any:
        time.sleep(DELAY_S)
        return work(self, ROOT + path, *arguments)

    return operation


class SlowFiles(Operations):  # type: ignore[misc]
    """Passes each operation on."""

    use_ns = True

    @late
    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        """Return the attributes of a file, a folder or a link."""
        found = os.lstat(path)
        times = {f"st_{kind}time": getattr(found, f"st_{kind}time_ns") for kind in "amc"}
        return {**{name: getattr(found, name) for name in STAT}, **times}

    @late
    def readdir(self, path: str, fh: int) -> list[str]:
        """Return the names in a folder."""
        return [".", "..", *os.listdir(path)]

    @late
    def readlink(self, path: str) -> str:
        """Return where a link leads."""
        return os.readlink(path)

    @late
    def open(self, path: str, flags: int) -> int:
        """Open a file; returns its descriptor."""
        return os.open(path, flags)

    @late
    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Return a part of a file."""
        return os.pread(fh, size, offset)

    @late
    def create(self, path: str, mode: int) -> int:
        """Make a file; returns its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    @late
    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        """Write a part of a file; returns how much."""
        return os.pwrite(fh, data, offset)

    @late
    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        """Set the length of a file."""
        os.truncate(path, length)

    @late
    def mkdir(self, path: str, mode: int) -> None:
        """Make a folder."""
        os.mkdir(path, mode)

    @late
    def unlink(self, path: str) -> None:
        """Remove a file or a link."""
        os.unlink(path)

    @late
    def symlink(self, path: str, target: str) -> None:
        """Make a link."""
        os.symlink(target, path)

    @late
    def rename(self, path: str, to: str) -> None:
        """Give a file or a link another name."""
        os.rename(path, ROOT + to)

    def release(self, path: str, fh: int) -> None:
        """Close a file; nobody waits for it."""
        os.close(fh)


if __name__ == "__main__":
    FUSE(SlowFiles(), MOUNT_POINT, foreground=True, allow_other=True)
