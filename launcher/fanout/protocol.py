"""What a launcher and its nodes tell each other over ssh: JSON objects with one key.

launcher -> node   {"check": {...}}, {"start": {...}} or {"sweep": {...}}, one per line. After a
                   start the stream is the agent's control stream (control.py).
node -> launcher   `<token> {"hello": {...}}` and so on, one per line, and after a start
                   `<token> beat` as a sign of life. All else is output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.agent.control import Done, Membership
from launcher.failure_block import Outcome
from launcher.preflight.check_node import Report
from launcher.typed_json import Kinds, MessageError
from launcher.wire.messages import Request


@dataclass(frozen=True)
class Start:
    """Start this node's agent."""

    command: Sequence[str]
    variables: Mapping[str, str]  # in addition to those that came with the connection
    directory: Path
    socket: str = ""  # where pdsh's process will ask for the command; empty: start it here


@dataclass(frozen=True)
class Sweep:
    """End what is left of a run, after its own connection was lost."""

    token: str


@dataclass(frozen=True)
class Hello:
    """The connection is there."""

    address: str  # of the node, as ssh reached it; empty: unknown

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9A-Fa-f.:]*(%\w+)?", self.address):
            raise ValueError(f"{self.address!r:.80} is no address")


@dataclass(frozen=True)
class Ready:
    """The node waits for pdsh's process."""


@dataclass(frozen=True)
class Cut:
    """pdsh's connection has ended before the agent."""


@dataclass(frozen=True)
class Exit:
    """The node's part of the run is over, and no process of it is left."""

    code: int  # the agent's
    left: int  # processes that had to be killed

    def __post_init__(self) -> None:
        if not (0 <= self.code <= 255 and self.left >= 0):
            raise ValueError(f"no exit code, or no number of processes: {self}")


LONGEST_MESSAGE = 1 << 20  # bytes
_LEAST_HELD = 4  # bytes; fewer are shown at once: they are probably a bar's
REQUESTS = Kinds(check=Request, start=Start, sweep=Sweep)
ANSWERS = Kinds(
    hello=Hello,
    report=Report,
    ready=Ready,
    cut=Cut,
    membership=Membership,
    outcome=Outcome,
    done=Done,
    exit=Exit,
)


def beat_line(token: str) -> bytes:
    """Return a node's sign of life, which may come within another message, or within output."""
    return f"{token} beat\n".encode()


class Answers:
    """What a node writes to stdout: its messages are taken out of its output."""

    def __init__(self, token: str, read: Callable[[bytes], Any] = ANSWERS.read) -> None:
        self._read = read
        self._mark = f"{token} ".encode()
        self._beat = beat_line(token)
        self._text = b""  # what may be a message, or its beginning
        self._passed = 0  # bytes of it that were passed on as output

    def read(self, data: bytes) -> tuple[bytes, list[Any]]:
        """Return the output, and the messages; at the end, without data, all that is left."""
        text, output, messages = self._text + data, [], []
        if text.startswith(self._beat):
            self._passed = 0
        text = text.replace(self._beat, b"")
        while (at := text.find(self._mark)) >= 0 and (end := text.find(b"\n", at)) >= 0:
            try:
                messages.append(self._read(text[at + len(self._mark) : end]))
                output.append(text[self._passed : at])
            except MessageError:
                output.append(text[self._passed : end + 1])
            text, self._passed = text[end + 1 :], 0
        kept = len(text) - at
        if at < 0:  # so many bytes at the end may begin a message
            sizes = range(min(len(text), len(self._mark) - 1), 0, -1)
            kept = next((size for size in sizes if text.endswith(self._mark[:size])), 0)
        if not data or kept > LONGEST_MESSAGE:
            kept = 0
        held = kept if kept >= _LEAST_HELD else 0
        passed = max(self._passed, len(text) - held)
        output.append(text[self._passed : passed])
        start = len(text) - kept
        self._text, self._passed = text[start:], max(0, passed - start)
        return b"".join(output), messages
