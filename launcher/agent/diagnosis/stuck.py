"""Find the stuck rank, which is silent while all others wait for it, and its stack (no torch).

Ranks write their Python stacks to files when they receive a signal (distributed/heartbeat.py).
"""

import operator
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.failure import user_frames
from launcher.own_time import turns
from launcher.text import group_ranks, read_text
from launcher.wire import limits
from launcher.wire.states import RankState

STOPPED = "its process is stopped (SIGSTOP)"
# A frame in a library, and any frame, as faulthandler writes them.
_IN_LIBRARY = re.compile(
    r'^ {2}File ".*/(site|dist)-packages/(?P<file>.+)", line (?P<line>\d+),? in (?P<name>.+)$'
)
_PLACE = re.compile(r'File "(?:.*/)?(.+)", line (\d+),? in (.+)')
# Code that waits for other ranks.
_WAITING = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")


def find_straggler(ranks: Sequence[RankState | None]) -> RankState | None:
    """Return the rank furthest behind; of several, a stopped one, otherwise the one silent longest.

    It is stuck only if all ranks that are as far behind are stuck. The ranks are those of a node
    or, for the entire run, each node's straggler. Returns None if there are no ranks, or if one is
    unknown, because it may be the one furthest behind.
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
    """Return the size of a file in bytes; 0 if it does not exist."""
    return file.stat().st_size if os.path.exists(file) else 0


def wait_for_stacks(files: Mapping[Path, int], limit_s: float) -> None:
    """Wait up to `limit_s` for all files to grow beyond their old sizes, and to stop growing."""
    sizes = list[int]()
    same = 0  # checks without a change: a busy machine writes a stack in parts
    for _ in turns(limit_s if files else 0, 5 * limits.POLL_S):
        before = sizes
        sizes = [*map(size_of, files)]
        same = same + 1 if sizes == before else 0
        if all(map(operator.gt, sizes, files.values())) and same >= 5:
            return


def read_threads(file: Path) -> list[str]:
    """Return each thread's stack as faulthandler last wrote it; the main thread's comes last."""
    return read_text(file).split("hread 0x")


def read_stack(file: Path) -> list[str]:
    """Return the main thread's stack as faulthandler last wrote it, innermost call first.

    The stack has the user's own frames, after the innermost call if that is in a library. If there
    are no such frames, as at Python's exit, it has Python's own, and one frame of another thread.
    """
    *others, main_thread = read_threads(file)
    frames = main_thread.splitlines()[1:]
    called = _IN_LIBRARY.match(frames[0]) if frames else None
    inner = [f"{called['file']}:{called['line']} in {called['name']}"] if called else []
    shown = [*inner, *user_frames(reversed(frames))]

    if shown:
        return shown

    own = [f"{name}:{line} in {function}" for name, line, function in _PLACE.findall(main_thread)]
    elsewhere = user_frames(reversed(others[-1].splitlines())) if others else []
    return [*own[:2], *(f"another thread: {frame}" for frame in elsewhere[:1])]


def group_stacks(stacks: Mapping[int, Sequence[str]]) -> dict[str, list[int]]:
    """Return each stack as one line, with the ranks that have it."""
    return group_ranks(
        {rank: " < ".join(frames) or "no Python stack" for rank, frames in stacks.items()}
    )


def find_awaited(straggler: RankState, stacks: Mapping[int, Sequence[str]]) -> int | None:
    """Return the rank that the others wait for; None if neither progress nor stacks show it.

    Of the ranks as far behind as the straggler, it is the stopped one, otherwise one that is not
    waiting in a collective itself; of several, or if all wait, one whose stack is the rarest.
    """
    if straggler.is_stopped or len(straggler.equals) == 1:
        return straggler.rank

    last = {rank: tuple(stacks[rank]) for rank in straggler.equals if rank in stacks}
    times = Counter(last.values())

    def how_common(rank: int) -> tuple[bool, int]:
        frames = last[rank]
        is_waiting = "".join(frames[:1]).startswith(_WAITING)
        return is_waiting, times[frames]

    if len({*map(how_common, last)}) < 2:  # no stack differs, or there is none
        return None
    return min(last, key=how_common)
