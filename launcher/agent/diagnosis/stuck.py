"""Which rank is stuck: the one that all others wait for, silent for too long; and where (no torch).

Ranks write their Python stacks to files on a signal (distributed/heartbeat.py).
"""

from __future__ import annotations

import operator
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.failure import user_frames
from launcher.text import name_ranks
from launcher.wire import limits

STOPPED = "its process is stopped (SIGSTOP)"
# A library's frame as faulthandler writes it, and where a rank is that waits for others.
_IN_LIBRARY = re.compile(
    r'^ {2}File ".*/(site|dist)-packages/(?P<file>.+)", line (?P<line>\d+),? in (?P<name>.+)$'
)
_PLACE = re.compile(r'File "(?:.*/)?(.+)", line (\d+),? in (.+)')
_WAITING = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")


@dataclass(frozen=True)
class RankState:
    """One living rank, as its agent sees it at one moment."""

    rank: int
    progress: tuple[int, ...]  # Beat.progress: step, and beats since then
    is_stuck: bool  # it has been silent for longer than its limit
    is_stopped: bool  # its process is stopped (SIGSTOP)
    silence_s: float  # since its last beat, or its start
    ends_run: bool = True  # its silence; that of a slow start may only be told
    equals: tuple[int, ...] = ()  # the ranks that are as far behind, of a straggler


def find_straggler(ranks: Sequence[RankState | None]) -> RankState | None:
    """Return the rank furthest behind: of several the stopped one, then the most silent.

    It is stuck only if all that are as far behind are. The ranks are those of a node or, for the
    whole run, each node's straggler. None without ranks, and where one is unknown: it may be the
    one furthest behind.
    """
    known = [state for state in ranks if state is not None]
    if not known or len(known) < len(ranks):
        return None
    progress = min(state.progress for state in known)
    last = [state for state in known if state.progress == progress]
    straggler = max(last, key=lambda state: (state.is_stopped, state.silence_s))
    equals = tuple(rank for state in last for rank in state.equals or (state.rank,))
    return replace(straggler, is_stuck=all(state.is_stuck for state in last), equals=equals)


def size_of(file: Path) -> int:
    """Return how much has been written to a file, in bytes; 0 if it is not there."""
    return file.stat().st_size if file.exists() else 0


def wait_for_stacks(files: Mapping[Path, int], limit_s: float) -> None:
    """Wait until all files have grown beyond their old sizes, or the time is up: some never do."""
    deadline = time.monotonic() + limit_s
    sizes: list[int] = []
    same = 0  # looks: a busy machine writes a stack in parts
    while files and time.monotonic() < deadline:
        before, sizes = sizes, [*map(size_of, files)]
        same = same + 1 if sizes == before else 0
        if all(map(operator.gt, sizes, files.values())) and same >= 5:
            return
        time.sleep(5 * limits.POLL_S)


def read_stack(file: Path) -> list[str]:
    """Return where the main thread was when faulthandler last wrote, innermost call first.

    These are the user's own frames, below the function of a library that they have called. If it
    has none, as at Python's exit, they are Python's, and another thread's.
    """
    try:
        threads = ["", *file.read_text(errors="replace").split("hread 0x")]
    except OSError:
        return []
    other, main_thread = threads[-2:]  # it comes last
    frames = main_thread.splitlines()[1:]
    called = _IN_LIBRARY.match(frames[0]) if frames else None
    inner = [f"{called['file']}:{called['line']} in {called['name']}"] if called else []
    shown = [*inner, *user_frames("\n".join(reversed(frames)))]
    own = [f"{name}:{line} in {function}" for name, line, function in _PLACE.findall(main_thread)]
    others = user_frames("\n".join(reversed(other.splitlines())))
    return shown or [*own[:2], *(f"another thread: {frame}" for frame in others[:1])]


def group_stacks(stacks: Mapping[int, Sequence[str]]) -> list[str]:
    """Return one line for all ranks that have the same stack, those of few ranks last."""
    ranks: dict[str, list[int]] = {}
    for rank, frames in sorted(stacks.items()):
        ranks.setdefault(" < ".join(frames) or "no Python stack", []).append(rank)
    by_size = sorted(ranks.items(), key=lambda group: -len(group[1]))
    return [f"{name_ranks(numbers)}: {place}" for place, numbers in by_size]


def find_odd(straggler: RankState, stacks: Mapping[int, Sequence[str]]) -> int | None:
    """Return the rank that the others wait for; None if neither progress nor stacks tell.

    Of the ranks as far behind as the straggler it is the stopped one, else one that does not wait
    in a collective itself, and of several one that few are with.
    """
    if straggler.is_stopped or len(straggler.equals) == 1:
        return straggler.rank
    last = {rank: tuple(stacks[rank]) for rank in straggler.equals if rank in stacks}
    places = Counter(last.values())
    busy = [rank for rank, frames in last.items() if not "".join(frames[:1]).startswith(_WAITING)]
    odd = min(busy, key=lambda rank: places[last[rank]], default=None)
    return odd if len(places) > 1 else None
