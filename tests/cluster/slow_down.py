"""Slow the self-test's ranks on this host by a factor, until killed: slow_down.py FACTOR.

It stops and continues them many times a second, as cpulimit does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

RUN_S = 0.01
LOOK_S = 0.05  # for new ranks


def find_ranks() -> list[int]:
    """Return the self-test's processes that have no child among them: the ranks."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"distributed.selftest" in (folder / "cmdline").read_bytes():
                found[int(folder.name)] = int((folder / "stat").read_text().split()[3])
    depth = {pid: parent in found and found[parent] in found for pid, parent in found.items()}
    return [pid for pid in found if depth[pid] and pid not in found.values()]


def send(ranks: list[int], signum: int) -> None:
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def main(times: float) -> None:
    ranks, looked = find_ranks(), time.monotonic()
    while True:
        if time.monotonic() > looked + LOOK_S:
            ranks, looked = find_ranks(), time.monotonic()
        time.sleep(RUN_S)
        send(ranks, signal.SIGSTOP)
        time.sleep(RUN_S * (times - 1))
        send(ranks, signal.SIGCONT)


if __name__ == "__main__":
    main(float(sys.argv[1]))
