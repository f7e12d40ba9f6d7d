"""What the kernel tells about a process: its files in /proc (proc(5))."""

import contextlib
from pathlib import Path


def read_proc(pid: int, name: str) -> bytes:
    """Return such a file; empty if the process has ended, or if we may not look."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
