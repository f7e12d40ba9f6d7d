"""All messages between the programs of a run, each a dataclass (no torch).

A message is sent as one line of JSON: `{"Exit":{"code":1,"left":0}}`. Nodes send such lines to each
other (node_link.py), and so do a launcher and its nodes (launcher_link.py). Received data is never
unpickled.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from distributed.environment import check_run_id
from launcher.failure import Failure
from launcher.outcome import NodeEnd, Outcome
from launcher.typed_json import MessageError, decode, encode, parse_json
from launcher.wire.states import Calls, RankState

MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Fault:
    """A fault: its name in TROUBLESHOOTING.md, its cause, and how to fix it. Some only warn."""

    name: str
    cause: str
    cure: str
    warns: bool = False


Faults = Iterator[Fault]  # of one check

# --- from a launcher to a node --------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a launcher asks a node to check: its part of the plan."""

    run_id: str
    num_nodes: int
    node_rank: int
    nproc: int | None  # None means one per GPU, or `cpu_nproc` if there is no GPU
    cpu_nproc: int  # 0 means that GPUs are needed
    master_addr: str
    port: int | None  # None means a port derived from the run id and the folder
    words: Sequence[str]  # the training script and its arguments
    directory: Path  # the base of relative paths
    log_dir: Path
    checkpoint_dir: Path | None
    has_checks: bool  # if False, only count the GPUs and choose the port
    backend: str
    num_workers: int  # data-loading processes of each rank
    meeting_size: int  # the number of nodes that meet at the port; 0 if they do not
    within_s: float  # for all of them to arrive


@dataclass(frozen=True)
class Start:
    """Start this node's agent."""

    command: Sequence[str]
    variables: Mapping[str, str]  # in addition to those that came with the connection
    directory: Path
    socket: str = ""  # where pdsh's process must connect first; empty means start now


@dataclass(frozen=True)
class Sweep:
    """End a run's leftover processes on this node, to which the connection was lost."""

    token: str


@dataclass(frozen=True)
class StopRequest:
    """A stop signal came from outside, to the launcher or to one of the agents."""

    signum: int
    node: int = -1  # the only one that acts on it, by its number in the token; -1: all


# --- between nodes that meet, for the preflight and for the run -----------------------------------


@dataclass(frozen=True)
class NodeReport:
    """What a node reports about itself, first in its preflight, then through its agent."""

    node_rank: int  # -1 means the next free one
    num_nodes: int
    nproc: int
    host: str
    run_id: str  # empty means node rank 0's
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # hashes by file name, and the arguments
    time: float = field(default_factory=time.time)  # seconds since the epoch
    failover_port: int = 0  # as in Member
    attempt: int = 0  # of the run, if it has lost node rank 0

    def __post_init__(self) -> None:
        if min(self.node_rank + 1, self.num_nodes - 1, self.nproc - 1) < 0:
            raise ValueError(f"node {self.node_rank} of {self.num_nodes} with {self.nproc} ranks")
        if self.run_id:
            check_run_id(self.run_id)


@dataclass(frozen=True)
class Member:
    """One node of a run. Its id never changes: it is the node rank with which it was started."""

    node_id: int
    host: str
    nproc: int  # ranks
    address: str = ""  # as node rank 0 sees it
    failover_port: int = 0  # where others reach it if it replaces node rank 0; 0 means none

    def __str__(self) -> str:
        return f"{self.host} ({self.address}:{self.failover_port})"


@dataclass(frozen=True)
class PairTest:
    """From node rank 0: try to reach all other members."""

    members: Sequence[Member]
    file: str  # on a file system that all should share; empty means none
    time: float = field(default_factory=time.time)  # on node rank 0, in seconds since the epoch


@dataclass(frozen=True)
class PairResult:
    """The result of a node's PairTest."""

    faults: Sequence[Fault]


@dataclass(frozen=True)
class Refusal:
    """The run will not start, or will continue without the receiver."""

    fault: str
    message: str


# --- from a node to its launcher ------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The connection is established."""

    address: str  # of the node, as ssh reached it; empty if unknown

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9A-Fa-f.:]*(%\w+)?", self.address):
            raise ValueError(f"{self.address!r:.80} is not an address")


@dataclass(frozen=True)
class Report(NodeReport):
    """The result of a node's preflight."""

    port: int = 0
    gpus: int = 0
    cpus: int = 0  # for all of its ranks
    faults: Sequence[Fault] = ()
    met: Sequence[Fault] = ()  # faults found at the master's port, if node rank 0 was there
    done: Sequence[str] = ()  # the checks made there; empty on node rank 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Ready:
    """The node is waiting for pdsh's process."""


@dataclass(frozen=True)
class Cut:
    """pdsh's connection ended before the agent exited."""


@dataclass(frozen=True)
class Membership:
    """The nodes with which a run continues, identified by their original node ranks."""

    attempt: int
    nodes: Sequence[int]  # in the order of the current node ranks, then the spares


@dataclass(frozen=True)
class Exit:
    """The node's part of the run is over, and none of its processes is left."""

    code: int  # the agent's
    left: int  # processes that had to be killed

    def __post_init__(self) -> None:
        if not (0 <= self.code <= 255 and self.left >= 0):
            raise ValueError(f"not an exit code, or not a number of processes: {self}")


# --- among the agents of a run --------------------------------------------------------------------


@dataclass(frozen=True)
class Assignment:
    """An agent's node rank and ranks in an attempt. Once it arrives, the ranks can start."""

    run_id: str
    first_rank: int
    world_size: int
    hosts: Sequence[str]  # by node rank
    attempt: int
    address: str  # of torch's store; empty means as in the agent's arguments
    port: int
    members: Sequence[Member]  # by node rank, if the run can replace nodes
    spares: Sequence[Member]
    node_rank: int = -1  # -1 means that it waits as a spare

    def __post_init__(self) -> None:
        check_run_id(self.run_id)
        if not 0 <= self.first_rank < self.world_size <= MOST_RANKS:
            raise ValueError(f"rank {self.first_rank} of {self.world_size} does not exist")
        if not (-1 <= self.node_rank < len(self.hosts) and 0 <= self.port < 65536):
            raise ValueError(f"node rank {self.node_rank}, port {self.port}: out of range")

    @property
    def successors(self) -> list[Member]:
        """The candidates to replace node rank 0 if it is lost; the first reachable one does so."""
        return [member for member in (*self.spares, *self.members[1:]) if member.failover_port]


@dataclass(frozen=True)
class Parts:
    """A snapshot whose parts are on several nodes, which combine them to save it."""

    step: int
    folder: str  # in the checkpoint folder; named like the leftovers of a killed save
    lost: Sequence[int]  # ranks whose own parts are lost, but copied on another node

    def __post_init__(self) -> None:
        if not re.fullmatch(r"step-\d+\.tmp-[0-9a-f]+", self.folder):
            raise ValueError(f"{self.folder} is not a folder for parts")


@dataclass(frozen=True)
class Verdict:
    """What node rank 0 sends to all nodes when an attempt has ended."""

    outcome: Outcome  # each agent adds its own start time, the run id and the command
    next: Assignment | None = None  # the receiver's, if another attempt follows
    parts: Parts | None = None  # of the newest snapshot, if it is on several nodes


@dataclass(frozen=True)
class StackRequest:
    """To node rank 0: show the stacks of all ranks. From it: send the stacks of your ranks."""


@dataclass(frozen=True)
class RankStack:
    """The stack of a living rank."""

    rank: int
    frames: Sequence[str]  # innermost first
    calls: Calls | None = None  # its latest collectives, if torch records them


@dataclass(frozen=True)
class NodeStacks:
    """The stacks of a node's living ranks."""

    ranks: Sequence[RankStack]


@dataclass(frozen=True)
class SnapshotPiece:
    """From node rank 0 to the node that keeps a copy of its snapshot; the bytes follow."""

    step: int
    offset: int  # in bytes
    length: int

    def __post_init__(self) -> None:
        if min(self.offset, self.length) < 0:
            raise ValueError(f"{self.length} bytes at {self.offset}: out of range")


@dataclass(frozen=True)
class SnapshotData:
    """A piece of a snapshot with its bytes."""

    piece: SnapshotPiece
    data: bytes


@dataclass(frozen=True)
class HandedOver:
    """To node rank 0: this node has written its parts of a snapshot, or reported why not."""


@dataclass(frozen=True)
class NodeBeat:
    """The heartbeat of a node's agent, every BEAT_S seconds."""

    straggler: RankState | None  # None if no rank of the node is alive


@dataclass(frozen=True)
class EndRanks:
    """From node rank 0: something has failed; end the ranks."""

    stuck: int = -1  # the rank that holds up the run, or -1; with one, first collect all stacks


@dataclass(frozen=True)
class RanksSave:
    """To the other agents: after a failure, ranks here may save for up to GRACE seconds."""


_ALL = *globals().values(), Failure, NodeEnd, Outcome
_KINDS = {kind.__name__: kind for kind in _ALL if isinstance(kind, type) and is_dataclass(kind)}


def write(message: object) -> str:
    """Return a message as one line, without the newline."""
    return f'{{"{type(message).__name__}":{encode(message)}}}'


def read(text: bytes | str) -> Any:
    """Return the message in a line. Raises MessageError if the line is not a valid message."""
    content = parse_json(text)
    if isinstance(content, dict) and len(content) == 1:
        ((name, fields),) = content.items()
        if name in _KINDS:
            return decode(_KINDS[name], fields)
    raise MessageError(f"not a message: {text!r:.80}")
