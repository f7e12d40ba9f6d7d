"""What an agent does in an attempt, as node rank 0 assigns it (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distributed.environment import check_run_id
from launcher.wire.messages import Member

MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Assignment:
    """What an agent does in an attempt: the ranks can start."""

    run_id: str
    first_rank: int
    world_size: int
    hosts: Sequence[str]  # by node rank
    node_rank: int = -1  # -1: it waits, as a spare
    attempt: int = 0
    address: str = ""  # of torch's store; empty: as the agent was started
    port: int = 0
    members: Sequence[Member] = ()  # by node rank, where the run can replace nodes
    spares: Sequence[Member] = ()

    def __post_init__(self) -> None:
        check_run_id(self.run_id)
        if not 0 <= self.first_rank < self.world_size <= MOST_RANKS:
            raise ValueError(f"rank {self.first_rank} of {self.world_size} is none")
        if not (-1 <= self.node_rank < len(self.hosts) and 0 <= self.port < 65536):
            raise ValueError(f"node rank {self.node_rank}, port {self.port}: there is none")

    @property
    def successors(self) -> list[Member]:
        """Who replaces node rank 0 when it is lost: the first of them that is reachable."""
        return [one for one in (*self.spares, *self.members[1:]) if one.failover_port]
