"""Which rank is stuck: the one that all others wait for, silent for too long (no torch, no I/O)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankState:
    """One living rank, as its agent sees it at one moment."""

    rank: int
    progress: tuple[int, ...]  # Beat.progress: step, and beats since then
    silence_s: float  # since its last beat; 0 before its first
    limit_s: float  # the longest silence before it counts as stuck
    is_stopped: bool = False  # its process is stopped (SIGSTOP)


@dataclass(frozen=True)
class Straggler:
    """The rank of a node that is furthest behind; the others wait for it."""

    rank: int
    progress: tuple[int, ...]
    is_stuck: bool  # it and all that are as far have been silent for longer than their limits
    is_stopped: bool
    silence_s: float


def find_straggler(ranks: Sequence[RankState]) -> Straggler | None:
    """Return a node's rank furthest behind: of several the stopped one, then the most silent.

    None where no rank lives.
    """
    if not ranks:
        return None
    progress = min(one.progress for one in ranks)
    last = [one for one in ranks if one.progress == progress]
    suspect = max(last, key=lambda one: (one.is_stopped, one.silence_s))
    return Straggler(
        rank=suspect.rank,
        progress=progress,
        is_stuck=all(one.silence_s > one.limit_s for one in last),
        is_stopped=suspect.is_stopped,
        silence_s=suspect.silence_s,
    )


def find_stuck(stragglers: Sequence[Straggler | None]) -> int | None:
    """Return the rank that holds up the run, of every node's straggler; None while none does.

    A node with no straggler, or none known yet, may hold the rank that is furthest behind.
    """
    known = [one for one in stragglers if one is not None]
    if not known or len(known) < len(stragglers):
        return None
    progress = min(one.progress for one in known)
    last = [one for one in known if one.progress == progress]
    if not all(one.is_stuck for one in last):
        return None
    return max(last, key=lambda one: (one.is_stopped, one.silence_s)).rank
