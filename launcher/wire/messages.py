"""All that the programs of a run tell each other: a message is a dataclass here (no torch).

On its way it is one line of JSON: `{"Exit":{"code":1,"left":0}}`. Nodes pass such lines to each
other (node_link.py), and so do a launcher and its nodes (launcher_link.py). Nothing that arrives is
ever unpickled.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from distributed.environment import check_run_id
from launcher.agent.diagnosis.collectives import Calls
from launcher.agent.diagnosis.stuck import RankState
from launcher.failure import Failure
from launcher.outcome import NodeEnd, Outcome
from launcher.typed_json import MessageError, decode, encode, parse_json

MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Fault:
    """What is wrong under its name in TROUBLESHOOTING.md, and the cure. Some only warn."""

    name: str
    cause: str
    cure: str
    warns: bool = False


# --- from a launcher to a node --------------------------------------------------------------------


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
class Start:
    """Start this node's agent."""

    command: Sequence[str]
    variables: Mapping[str, str]  # in addition to those that came with the connection
    directory: Path
    socket: str = ""  # where pdsh's process is to come first; empty: start it now


@dataclass(frozen=True)
class Sweep:
    """End what is left of a run, after its own connection was lost."""

    token: str


@dataclass(frozen=True)
class StopRequest:
    """A stop signal came from outside, to the launcher or to one of the agents."""

    signum: int


# --- of nodes that meet, for the preflight and for the run ----------------------------------------


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


# --- from a node to its launcher ------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The connection is there."""

    address: str  # of the node, as ssh reached it; empty: unknown

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9A-Fa-f.:]*(%\w+)?", self.address):
            raise ValueError(f"{self.address!r:.80} is no address")


@dataclass(frozen=True)
class Report(NodeReport):
    """What a node found out about itself."""

    port: int = 0
    gpus: int = 0
    cpus: int = 0  # for all of its ranks
    faults: Sequence[Fault] = ()
    met: Sequence[Fault] = ()  # those found at the master's port, if node rank 0 was there
    done: Sequence[str] = ()  # the checks made there; node rank 0 makes none alone
    seconds: float = 0.0


@dataclass(frozen=True)
class Ready:
    """The node waits for pdsh's process."""


@dataclass(frozen=True)
class Cut:
    """pdsh's connection has ended before the agent."""


@dataclass(frozen=True)
class Membership:
    """The nodes that a run continues with, each by the node rank that it was started with."""

    attempt: int
    nodes: Sequence[int]  # by node rank, and after them the spares


@dataclass(frozen=True)
class Exit:
    """The node's part of the run is over, and no process of it is left."""

    code: int  # the agent's
    left: int  # processes that had to be killed

    def __post_init__(self) -> None:
        if not (0 <= self.code <= 255 and self.left >= 0):
            raise ValueError(f"no exit code, or no number of processes: {self}")


# --- among the agents of a run --------------------------------------------------------------------


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
class Parts:
    """A snapshot whose parts are on several nodes, which put them together to save it."""

    step: int
    folder: str  # below that of the run's checkpoints; what a killed save leaves has such a name
    lost: Sequence[int] = ()  # ranks whose own parts are lost: another node has copies

    def __post_init__(self) -> None:
        if not re.fullmatch(r"step-\d+\.tmp-[0-9a-f]+", self.folder):
            raise ValueError(f"{self.folder} is no folder for parts")


@dataclass(frozen=True)
class Verdict:
    """What node rank 0 tells all nodes when an attempt has ended."""

    outcome: Outcome  # without what each agent adds itself: its start, the run id, the command
    next: Assignment | None = None  # the agent's part in the attempt that follows
    parts: Parts | None = None  # of the newest snapshot, if it is on several nodes


@dataclass(frozen=True)
class StackRequest:
    """To node rank 0: show where all ranks are. From it: tell where yours are."""


@dataclass(frozen=True)
class RankStack:
    """Where a living rank is."""

    rank: int
    frames: Sequence[str]  # innermost first
    calls: Calls | None = None  # its newest collectives, if torch records them


@dataclass(frozen=True)
class NodeStacks:
    """Where the living ranks of a node are."""

    ranks: Sequence[RankStack]


@dataclass(frozen=True)
class SnapshotPiece:
    """From node rank 0, to the node that keeps a copy of its snapshot: the bytes that follow."""

    step: int
    offset: int  # in bytes
    length: int

    def __post_init__(self) -> None:
        if min(self.offset, self.length) < 0:
            raise ValueError(f"{self.length} bytes at {self.offset}: there are none")


@dataclass(frozen=True)
class SnapshotData:
    """A piece of a snapshot with its bytes."""

    piece: SnapshotPiece
    data: bytes


@dataclass(frozen=True)
class HandedOver:
    """To node rank 0: this node has written its parts of a snapshot, or told why it could not."""


@dataclass(frozen=True)
class NodeBeat:
    """The heartbeat of a node's agent, every BEAT_S seconds."""

    straggler: RankState | None  # None: no rank of it is alive


@dataclass(frozen=True)
class EndRanks:
    """From node rank 0: something has failed; end the ranks."""

    stuck: int = -1  # the rank that holds up the run; first collect all stacks. -1: none


_ALL = *globals().values(), Failure, NodeEnd, Outcome
_KINDS = {kind.__name__: kind for kind in _ALL if isinstance(kind, type) and is_dataclass(kind)}


def write(message: object) -> str:
    """Return a message as one line, without its end."""
    return f'{{"{type(message).__name__}":{encode(message)}}}'


def read(text: bytes | str) -> Any:
    """Return the message of a line; raises MessageError if it is none, or does not fit."""
    content = parse_json(text)
    if isinstance(content, dict) and len(content) == 1:
        ((name, fields),) = content.items()
        if name in _KINDS:
            return decode(_KINDS[name], fields)
    raise MessageError(f"no message: {text!r:.80}")
