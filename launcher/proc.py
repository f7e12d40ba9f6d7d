"""What the kernel tells about a process: its files in /proc (proc(5))."""

import contextlib
from pathlib import Path


def read_proc(pid: int, name: str) -> bytes:
    """Return the content of /proc/PID/NAME; empty if the process has ended or denies it to us."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
