"""Where each rank is stuck: the Python stacks that ranks write on a signal (no torch)."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.heartbeat import STACK_SIGNAL
from launcher import processes
from launcher.failure import user_frames

WRITE_S = 1.0  # for the ranks to write their stacks


@dataclass(frozen=True)
class Source:
    """A living rank whose stack is wanted."""

    rank: int
    pid: int
    file: Path  # where it writes its stack
    is_beating: bool  # it has made a beat, so it writes its stack on the signal
    is_stopped: bool  # its process is stopped (SIGSTOP)


def collect_stacks(sources: Sequence[Source]) -> dict[int, list[str]]:
    """Have ranks write their stacks; returns by rank its own frames, innermost first.

    Blocks up to WRITE_S, twice where a process is stopped. Stopped processes are continued, or
    they could not write.
    """
    beating = [one for one in sources if one.is_beating]
    processes.send([one.pid for one in beating], STACK_SIGNAL)
    wait_for_stacks([one.file for one in beating if not one.is_stopped], WRITE_S)
    stopped = [one for one in beating if one.is_stopped]
    processes.send([one.pid for one in stopped], signal.SIGCONT)
    wait_for_stacks([one.file for one in stopped], WRITE_S)
    return {one.rank: read_stack(one.file) for one in sources}


def wait_for_stacks(files: Sequence[Path], limit_s: float) -> None:
    """Wait until all files have been written, or the time is up: some ranks never write."""
    deadline = time.monotonic() + limit_s
    sizes: list[int] = []
    while files and time.monotonic() < deadline:
        before, sizes = sizes, [file.stat().st_size for file in files]
        if all(sizes) and sizes == before:
            return
        time.sleep(0.05)


def read_stack(file: Path) -> list[str]:
    """Return the main thread's own frames in what faulthandler wrote, innermost first."""
    try:
        main_thread = file.read_text(errors="replace").rpartition("hread 0x")[2]  # it comes last
    except OSError:
        return []
    return user_frames("\n".join(reversed(main_thread.splitlines())))


def group_stacks(stacks: Mapping[int, Sequence[str]]) -> list[str]:
    """Return one line for all ranks that have the same stack."""
    ranks: dict[str, list[str]] = {}
    for rank, frames in stacks.items():
        ranks.setdefault(" < ".join(frames) or "no Python stack", []).append(str(rank))
    return [f"rank {', '.join(numbers)}: {place}" for place, numbers in ranks.items()]
