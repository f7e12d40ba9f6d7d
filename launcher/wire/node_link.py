"""One end of a connection between two nodes (no torch).

A message is one line of JSON, and a dataclass here. Nothing that arrives is ever unpickled.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import ClassVar, Generic, TypeVar, cast

from launcher import own_time
from launcher.typed_json import Kinds, MessageError
from launcher.wire import limits
from launcher.wire.messages import MEETING

M = TypeVar("M")  # a message
_MAX_BYTES = 1 << 20


class Link(Generic[M]):
    """One end of a connection between two nodes."""

    kinds: ClassVar[Kinds] = Kinds(**MEETING)

    def __init__(self, connection: socket.socket, received: bytes = b"") -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.heard = time.monotonic()
        self._buffer = received

    def send(self, message: M) -> None:
        """Send one message; a node that is gone is noticed where it is read."""
        self._write(self.kinds.write(message))

    def _write(self, line: str, data: bytes = b"") -> None:
        try:
            self.socket.settimeout(limits.SILENCE_S)
            self.socket.sendall(f"{line}\n".encode() + data)
        except OSError:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # reading it now finds its end

    def receive(self, limit_s: float = limits.SILENCE_S) -> list[M] | None:
        """Return the messages that have arrived; None when the node is gone, or is none of ours."""
        if not self._fill(limit_s):
            return None
        try:
            return [*iter(self._take, None)]
        except MessageError:
            return None

    def wait(self, deadline: float) -> M | None:
        """Return the next message.

        None when the node is gone, is none of ours, or `deadline` (of own_time) has passed.
        """
        try:
            while (message := self._take()) is None:
                left_s = deadline - own_time.now()
                if left_s <= 0 or not self._fill(min(left_s, limits.BEAT_S)):
                    return None
            return message
        except MessageError:
            return None

    def _take(self) -> M | None:
        """Return the next message that has arrived in full; raises MessageError."""
        line, line_end, rest = self._buffer.partition(b"\n")
        if not line_end:
            return None
        message = cast(M, self.kinds.read(line))
        self._buffer = rest  # for later
        return message

    def wait_for_end(self, deadline: float) -> None:
        """Wait until the node is gone, or `deadline` (of own_time) has passed."""
        while (left_s := deadline - own_time.now()) > 0 and self._fill(min(left_s, limits.BEAT_S)):
            self._buffer = b""

    def _fill(self, limit_s: float) -> bool:
        """Take what arrives within the limit; False when the node is gone, or is none of ours."""
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

    def close(self) -> None:
        self.socket.close()
