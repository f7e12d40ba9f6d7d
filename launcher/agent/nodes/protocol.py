"""The node agents' connections to the agent of node rank 0, from check-in to the end (no torch).

Each agent holds one TCP connection to the master address and port, where the torch store is served
afterwards on the same listening socket. The kernel ends the connection at an agent's death, so the
others know at once; beats tell a network that was cut.

A message is one line of JSON, and a dataclass here; the bytes of a snapshot follow their line.
Nothing that arrives is ever unpickled.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from launcher import own_time
from launcher.agent.assignment import Assignment
from launcher.agent.diagnosis.collectives import Calls
from launcher.agent.diagnosis.stuck import RankState
from launcher.agent.verdict import NodeEnd, Verdict
from launcher.failure import Failure
from launcher.preflight.meeting import Doors, Tried
from launcher.preflight.must_match import NodeReport
from launcher.typed_json import Kinds, MessageError
from launcher.wire import limits

_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Refusal:
    """The run does not start."""

    fault: str
    message: str


@dataclass(frozen=True)
class StopRequest:
    """A stop signal came from outside to one of the agents."""

    signum: int


@dataclass(frozen=True)
class StackRequest:
    """To node rank 0: show where all ranks are. From it: tell where yours are."""


@dataclass(frozen=True)
class NodeStacks:
    """Where the living ranks of a node are."""

    frames: Mapping[str, Sequence[str]]  # innermost first, by rank
    collectives: Mapping[str, Calls] = field(default_factory=dict)  # by rank

    def __post_init__(self) -> None:
        if not all(rank.isdecimal() for rank in (*self.frames, *self.collectives)):
            raise ValueError("no ranks")


@dataclass(frozen=True)
class SnapshotPiece:
    """From node rank 0, to the node that keeps a copy of its snapshot: the bytes that follow."""

    step: int
    offset: int  # in bytes
    length: int
    size: int  # of the whole

    def __post_init__(self) -> None:
        if not 0 <= self.offset <= self.offset + self.length <= self.size:
            raise ValueError(f"{self.offset} + {self.length} is beyond {self.size}")


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
    """A node's agent lives; every BEAT_S seconds."""

    straggler: RankState | None  # None: no rank of it lives


@dataclass(frozen=True)
class EndRanks:
    """From node rank 0: something has failed; end the ranks."""

    stuck: int = -1  # the rank that holds up the run; first collect all stacks. -1: none


Message: TypeAlias = (
    NodeReport | Doors | Tried | Refusal | Assignment | StopRequest | StackRequest | NodeStacks
    | NodeBeat | SnapshotData | HandedOver | EndRanks | NodeEnd | Verdict
    | Failure  # of a rank of the node that sends it
)  # fmt: skip
MESSAGES = Kinds(
    hello=NodeReport,
    doors=Doors,
    tried=Tried,
    refused=Refusal,
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


class Peer:
    """One end of a connection between two agents."""

    def __init__(self, connection: socket.socket, received: bytes = b"") -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.heard = time.monotonic()
        self._buffer = received

    def send(self, message: Message) -> None:
        """Send one message; a peer that is gone is noticed where it is read."""
        if isinstance(message, SnapshotData):
            text, data = MESSAGES.write(message.piece), message.data
        else:
            text, data = MESSAGES.write(message), b""
        try:
            self.socket.sendall(f"{text}\n".encode() + data)
        except OSError:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # reading it now finds its end

    def receive(self) -> list[Message] | None:
        """Return the messages that have arrived; None when the peer is gone, or is no agent."""
        if not self._fill():
            return None
        messages: list[Message] = []
        try:
            while (message := self._take()) is not None:
                messages.append(message)
        except MessageError:
            return None
        return messages

    def wait(self, deadline: float) -> Message | None:
        """Return the next message.

        None when the peer is gone, is no agent, or `deadline` (of own_time) has passed.
        """
        try:
            while (message := self._take()) is None:
                left_s = deadline - own_time.now()
                if left_s <= 0 or not self._fill(min(left_s, limits.BEAT_S)):
                    return None
            return message
        except MessageError:
            return None

    def _take(self) -> Message | None:
        """Return the next message that has arrived in full; raises MessageError."""
        line, line_end, rest = self._buffer.partition(b"\n")
        if not line_end:
            return None
        message: Message | SnapshotPiece = MESSAGES.read(line)
        if isinstance(message, SnapshotPiece):
            data, rest = rest[: message.length], rest[message.length :]
            if len(data) < message.length:
                return None
            message = SnapshotData(message, data)
        self._buffer = rest  # for later
        return message

    def wait_for_end(self, deadline: float) -> None:
        """Wait until the peer is gone, or `deadline` (of own_time) has passed."""
        while (left_s := deadline - own_time.now()) > 0 and self._fill(min(left_s, limits.BEAT_S)):
            self._buffer = b""

    def _fill(self, limit_s: float = limits.SILENCE_S) -> bool:
        """Take what arrives within the limit; False when the peer is gone, or is no agent."""
        self.socket.settimeout(limit_s)
        try:
            data = self.socket.recv(65536)
        except TimeoutError:
            return True
        except OSError:
            return False
        self.heard = time.monotonic()
        self._buffer += data
        return bool(data) and len(self._buffer) <= _MAX_BYTES

    @property
    def is_silent(self) -> bool:
        """Whether nothing has come for SILENCE_S seconds."""
        return own_time.since(self.heard) > limits.SILENCE_S

    def loss(self, node_rank: int, host: str) -> Failure:
        """Return the failure of the agent at the other end, which is gone or out of reach."""
        fault, cause = "agent-killed", "its node agent is gone"
        if self.is_silent:
            fault, cause = "link-lost", f"no sign of life for {limits.SILENCE_S:g} s: network cut?"
        return Failure(fault, cause, 128 + signal.SIGKILL, host, node_rank, time.time())

    def close(self) -> None:
        self.socket.close()
