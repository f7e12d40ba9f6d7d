"""What nodes are asked and tell each other: in the preflight, and as agents (no torch)."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distributed.environment import check_run_id

MOST_RANKS = 1 << 20
KILLED = 128 + signal.SIGKILL  # exit code of a process that was killed


@dataclass(frozen=True)
class Fault:
    """What is wrong under its name in TROUBLESHOOTING.md, and the cure. Some only warn."""

    name: str
    cause: str
    cure: str
    warns: bool = False


@dataclass(frozen=True)
class Request:
    """What a launcher asks a node to check: its part of the plan."""

    run_id: str
    num_nodes: int
    node_rank: int
    nproc: int | None  # None: one per GPU, else `cpu_nproc`
    cpu_nproc: int  # 0: GPUs are needed
    master_addr: str
    port: int | None  # None: from the run id
    words: Sequence[str]  # the training script and its arguments
    directory: Path  # where relative paths begin
    log_dir: Path
    checkpoint_dir: Path | None
    has_checks: bool = True  # False: only count the GPUs and choose the port
    backend: str = "auto"
    num_workers: int = 0  # processes of each rank that load data
    meeting_size: int = 0  # nodes that meet at the port; 0: they do not
    within_s: float = 7.0  # for all of them to have come


@dataclass(frozen=True)
class NodeReport:
    """What a node says of itself: at check-in its agent, before that its preflight."""

    node_rank: int  # -1: the next one free
    num_nodes: int
    nproc: int
    host: str
    run_id: str  # empty: takes node rank 0's
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # of hash_files(), describe_program()
    time: float = field(default_factory=time.time)  # seconds since the epoch
    failover_port: int = 0  # as Member has it
    attempt: int = 0  # of the run, where it has lost node rank 0

    def __post_init__(self) -> None:
        if min(self.node_rank + 1, self.num_nodes - 1, self.nproc - 1) < 0:
            raise ValueError(f"node {self.node_rank} of {self.num_nodes} with {self.nproc} ranks")
        if self.run_id:
            check_run_id(self.run_id)


@dataclass(frozen=True)
class Member:
    """One node of a run. Its id never changes: the node rank with which it was started."""

    node_id: int
    host: str
    nproc: int  # ranks
    address: str = ""  # as node rank 0 sees it
    failover_port: int = 0  # at which any other can reach it, if it replaces node rank 0; 0: none

    def __str__(self) -> str:
        return f"{self.host} ({self.address}:{self.failover_port})"


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
        return [member for member in (*self.spares, *self.members[1:]) if member.failover_port]


@dataclass(frozen=True)
class PairTest:
    """From node rank 0: try to reach all other members."""

    members: Sequence[Member]
    file: str = ""  # on a file system that all should share; empty: none
    time: float = field(default_factory=time.time)  # on node rank 0, in seconds since the epoch


@dataclass(frozen=True)
class PairResult:
    """What a node found then."""

    faults: Sequence[Fault]


@dataclass(frozen=True)
class Refusal:
    """The run does not start."""

    fault: str
    message: str


MEETING = {"hello": NodeReport, "pairs": PairTest, "tried": PairResult, "refused": Refusal}
