"""An agent's part in the run, as node rank 0 gives it (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distributed.environment import check_run_id

MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Seat:
    """One agent, wherever it sits. Its place never changes: the node rank it was started with."""

    place: int
    host: str
    nproc: int  # ranks
    address: str = ""  # as node rank 0 sees it
    door: int = 0  # the port where it takes node rank 0's place; 0: none


@dataclass(frozen=True)
class Assignment:
    """An agent's part in an attempt: the ranks can start."""

    run_id: str
    first_rank: int
    world_size: int
    hosts: Sequence[str]  # by node rank
    node_rank: int = -1  # -1: it waits, as a spare
    attempt: int = 0
    address: str = ""  # of torch's store; empty: as the agent was started
    port: int = 0
    seats: Sequence[Seat] = ()  # by node rank, where the run can replace nodes
    spares: Sequence[Seat] = ()

    def __post_init__(self) -> None:
        check_run_id(self.run_id)
        if not 0 <= self.first_rank < self.world_size <= MOST_RANKS:
            raise ValueError(f"rank {self.first_rank} of {self.world_size} is none")
        if not (-1 <= self.node_rank < len(self.hosts) and 0 <= self.port < 65536):
            raise ValueError(f"node rank {self.node_rank}, port {self.port}: there is none")

    @property
    def heirs(self) -> list[Seat]:
        """Who takes node rank 0's place when it is lost, the first of them that is there."""
        return [seat for seat in (*self.spares, *self.seats[1:]) if seat.door]
