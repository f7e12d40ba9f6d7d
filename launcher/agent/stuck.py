"""Which rank is stuck: the one that all others wait for, silent for too long; and where (no torch).

Ranks write their Python stacks to files on a signal (distributed/heartbeat.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.failure import user_frames


@dataclass(frozen=True)
class RankState:
    """One living rank, as its agent sees it at one moment."""

    rank: int
    progress: tuple[int, ...]  # Beat.progress: step, and beats since then
    is_stuck: bool  # it has been silent for longer than its limit
    is_stopped: bool  # its process is stopped (SIGSTOP)
    silence_s: float  # since its last beat; 0 before its first


def find_straggler(ranks: Sequence[RankState | None]) -> RankState | None:
    """Return the rank furthest behind: of several the stopped one, then the most silent.

    It is stuck only if all that are as far behind are. The ranks are those of a node or, for the
    whole run, each node's straggler. None without ranks, and where one is unknown: it may be the
    one furthest behind.
    """
    known = [one for one in ranks if one is not None]
    if not known or len(known) < len(ranks):
        return None
    progress = min(one.progress for one in known)
    last = [one for one in known if one.progress == progress]
    straggler = max(last, key=lambda one: (one.is_stopped, one.silence_s))
    return replace(straggler, is_stuck=all(one.is_stuck for one in last))


def wait_for_stacks(files: Sequence[Path], limit_s: float) -> None:
    """Wait until all files have been written, or the time is up: some ranks never write."""
    deadline = time.monotonic() + limit_s
    sizes: list[int] = []
    same = 0  # looks: a busy machine writes a stack in parts
    while files and time.monotonic() < deadline:
        before, sizes = sizes, [file.stat().st_size for file in files]
        same = same + 1 if sizes == before else 0
        if all(sizes) and same >= 5:
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
