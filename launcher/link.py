"""The node agents' connection to the agent of node rank 0, from check-in to the end (no torch).

Each agent holds one TCP connection to the master address and port, where the torch store is served
afterwards on the same listening socket. The kernel ends the connection at an agent's death, so the
others know at once; beats tell a network that was cut. Messages are JSON, one a line: nothing that
arrives is ever unpickled.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

BEAT_S = 2.0
SILENCE_S = 10.0  # without a beat for so long, a node is lost
_MAX_BYTES = 1 << 20


class Peer:
    """One end of a connection between two agents."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.heard = time.monotonic()
        self._buffer = b""

    def send(self, kind: str, **content: Any) -> None:
        """Send one message; a peer that is gone is noticed where it is read."""
        try:
            self.socket.sendall(json.dumps({"kind": kind, **content}).encode() + b"\n")
        except OSError:
            self.close()

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived; None when the peer is gone."""
        if not self._fill():
            return None
        *lines, self._buffer = self._buffer.split(b"\n")
        messages = [_parse(line) for line in lines]
        return None if None in messages else [message for message in messages if message]

    def wait(self, deadline: float) -> dict[str, Any] | None:
        """The next message, or None when the peer is gone or `deadline` (monotonic) has passed."""
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.socket.settimeout(left)
            is_there = self._fill()
            self.socket.settimeout(SILENCE_S)
            if not is_there:
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")  # what follows is for later
        return _parse(line)

    def _fill(self) -> bool:
        """Take what has arrived; False when the peer is gone, or is no agent."""
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
        return time.monotonic() - self.heard > SILENCE_S

    def close(self) -> None:
        self.socket.close()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None  # whatever this is, it is no agent
    return message if isinstance(message, dict) else None
