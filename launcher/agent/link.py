"""What the agent and its supervisor hold of each other (no torch)."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from launcher import typed_json
from launcher.agent.control import Control


@dataclass(frozen=True)
class AgentNote:
    """What the agent tells the supervisor once the run has begun."""

    run_id: str
    node_rank: int
    started: float  # seconds since the epoch
    ranks: int  # on this node
    folder: str = ""  # of the run, where this node writes run.json
    command: str = ""  # that resumes it; empty where nothing does


@dataclass(frozen=True)
class SupervisorLink:
    """What the agent holds of its supervisor; no rank does."""

    socket: socket.socket  # for the note; its other end closes when the supervisor dies
    control: Control | None  # the connection to a launcher elsewhere, if there is one
    reaper: int | None  # tells the reaper of the agent's end
    words: int  # a file for what the agent says last (supervisor.py)

    def tell(self, note: AgentNote) -> None:
        self.socket.sendall(typed_json.encode(note).encode())

    def close(self) -> None:
        """In a rank, let go of all."""
        self.socket.close()
        close(self.reaper)
        os.close(self.words)


def close(fd: int | None) -> None:
    """Close a descriptor, where there is one."""
    if fd is not None:
        os.close(fd)
