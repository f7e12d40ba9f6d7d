"""The node agents' connections to the agent of node rank 0, from check-in to the end (no torch).

Each agent holds one TCP connection to the master address and port, where the torch store is served
afterwards on the same listening socket. The kernel ends the connection at an agent's death, so the
others know at once; missing beats reveal a cut network.

The bytes of a snapshot follow their line.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from launcher.agent.diagnosis.collectives import Calls
from launcher.agent.diagnosis.stuck import RankState
from launcher.agent.verdict import NodeEnd, Verdict
from launcher.failure import Failure
from launcher.typed_json import Kinds
from launcher.wire import limits
from launcher.wire.messages import (
    KILLED,
    MEETING,
    Assignment,
    NodeReport,
    PairResult,
    PairTest,
    Refusal,
)
from launcher.wire.node_link import Link


@dataclass(frozen=True)
class StopRequest:
    """A stop signal came from outside to one of the agents."""

    signum: int


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


Message: TypeAlias = (
    NodeReport | PairTest | PairResult | Refusal | Assignment | StopRequest | StackRequest
    | NodeStacks | NodeBeat | SnapshotData | HandedOver | EndRanks | NodeEnd | Verdict
    | Failure  # of a rank of the node that sends it
)  # fmt: skip
MESSAGES = Kinds(
    **MEETING,
    start=Assignment,
    signal=StopRequest,
    where=StackRequest,
    stacks=NodeStacks,
    beat=NodeBeat,
    snapshot=SnapshotPiece,
    parts=HandedOver,
    failure=Failure,
    end=EndRanks,
    done=NodeEnd,
    verdict=Verdict,
)


class Peer(Link[Message]):
    """One end of a connection between two agents."""

    kinds = MESSAGES

    def send(self, message: Message) -> None:
        """Send one message; a peer that is gone is noticed where it is read."""
        if isinstance(message, SnapshotData):
            self._write(MESSAGES.write(message.piece), message.data)
        else:
            super().send(message)

    def _take(self) -> Message | None:
        """Return the next message that has arrived in full; raises MessageError."""
        before = self._buffer
        message: Message | SnapshotPiece | None = super()._take()
        if not isinstance(message, SnapshotPiece):
            return message
        data, self._buffer = self._buffer[: message.length], self._buffer[message.length :]
        if len(data) == message.length:
            return SnapshotData(message, data)
        self._buffer = before
        return None

    def loss(self, node_rank: int, host: str) -> Failure:
        """Return the failure of the agent at the other end, which is gone or out of reach."""
        fault, cause = "agent-killed", "its node agent is gone"
        if self.is_silent:
            fault, cause = "link-lost", f"no heartbeat for {limits.SILENCE_S:g} s (network down?)"
        return Failure(fault, cause, KILLED, host, node_rank, time.time())
