"""What a launcher and its nodes tell each other over ssh: JSON objects with one key.

launcher -> node   {"check": {...}}, {"start": {...}} or {"sweep": {...}}, each after a line with
                   its size. After a start the stream is the agent's control stream (control.py).
node -> launcher   `<token> {"hello": {...}}` and so on, a line each. All else is output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.failure_block import End
from launcher.preflight.check_node import Report, Request
from launcher.typed_json import Kinds, MessageError


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


REQUESTS = Kinds(check=Request, start=Start, sweep=Sweep)
ANSWERS = Kinds(hello=Hello, report=Report, ready=Ready, cut=Cut, end=End, exit=Exit)


def write_request(request: Request | Start | Sweep) -> str:
    """Return a request with its size before it, so that a node reads it and nothing else."""
    text = REQUESTS.write(request)
    return f"{len(text)}\n{text}"


def read_answer(token: str, line: bytes) -> tuple[bytes, Any]:
    """Return the output that a line of a node holds, and the message behind it; None: none fits."""
    output, mark, text = line.partition(f"{token} ".encode())
    try:
        return (output, ANSWERS.read(text)) if mark else (line, None)
    except MessageError:
        return line, None
