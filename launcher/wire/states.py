"""What a rank is doing, as its agent sees it and tells the others (no torch)."""

from collections.abc import Sequence
from dataclasses import dataclass

# Every rank calls these with tensors of the same size.
_EQUAL_SIZES = ("all_reduce", "broadcast", "reduce")


@dataclass(frozen=True)
class RankState:
    """One living rank, as its agent sees it at one moment."""

    rank: int
    progress: tuple[int, ...]  # step, and beats since then
    is_stuck: bool  # it has been silent for longer than its limit
    is_stopped: bool  # its process is stopped (SIGSTOP)
    silence_s: float  # since its last beat, or its start
    ends_run: bool = True  # whether its silence ends the run; a slow start is only reported
    equals: tuple[int, ...] = ()  # of a straggler: all ranks that are as far behind


@dataclass(frozen=True)
class Collective:
    """One rank's call of a collective."""

    group: str  # the process group's name
    number: int  # the call's number in the group, from 1
    operation: str
    sizes: str  # the input's sizes and type
    is_done: bool

    def __str__(self) -> str:
        return f"#{self.number} {self.operation} of {self.sizes or 'nothing'}"

    @property
    def must_match(self) -> tuple[str, str]:
        """What must be the same on all ranks: the operation, and the sizes if it requires that."""
        return self.operation, self.sizes if self.operation in _EQUAL_SIZES else ""


@dataclass(frozen=True)
class Calls:
    """A rank's latest collectives."""

    calls: Sequence[Collective] = ()
