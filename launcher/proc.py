"""What the kernel tells about a process: its files in /proc (proc(5))."""

from __future__ import annotations

import contextlib


def read_proc(pid: int, name: str) -> bytes:
    """Return such a file; empty if the process has ended, or if we may not look."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""
