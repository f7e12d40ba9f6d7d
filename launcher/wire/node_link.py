"""One end of the connection between two nodes, from check-in to the end of the run (no torch).

Each agent holds one TCP connection to the master address and port, where the torch store is later
served on the same listening socket. The kernel closes the connection when an agent dies, so the
agent at the other end notices at once; missed heartbeats reveal a broken connection. The preflight
also uses such connections.

Each message is one line (messages.py). The bytes of a snapshot follow the line that announces them.
"""

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher import own_time
from launcher.descriptors import wait_for_input
from launcher.failure import Failure
from launcher.processes import KILLED
from launcher.text import Say
from launcher.typed_json import MessageError
from launcher.wire import limits, messages
from launcher.wire.messages import NodeBeat, SnapshotData, SnapshotPiece

_MAX_BYTES = 1 << 23  # enough to name all members of a run of 50,000 nodes
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_LAST_ACK_AT = 56  # of tcp_info: the milliseconds since the kernel at the other end last answered


class Link:
    """One end of a connection between two nodes."""

    def __init__(self, connection: socket.socket, received: bytes = b"") -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.heard = time.monotonic()
        self.silence_s = limits.SILENCE_S  # a longer silence means that the other end is lost
        self.news = own_time.SilenceNews()
        self._buffer = received
        self._error = 0  # why the connection ended, if the kernel knows
        self._sending = threading.RLock()  # a signal handler may send during a send

    def send(self, message: object, *, may_wait: bool = True) -> None:
        """Send a message, or one as written. If the node is gone, the next read reports that.

        A node that has not accepted it after `silence_s` seconds counts as gone. Without
        `may_wait`, send nothing while another thread is sending.
        """
        data = b""
        if isinstance(message, SnapshotData):
            data = message.data
            message = message.piece
        line = message if isinstance(message, str) else messages.write(message)
        if not self._sending.acquire(blocking=may_wait):
            return

        try:
            self.socket.settimeout(self.silence_s)
            self.socket.sendall(f"{line}\n".encode() + data)
        except OSError as error:
            self._error = error.errno or 0
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # the next read finds the end
        finally:
            self._sending.release()

    def receive(self, limit_s: float = limits.SILENCE_S) -> list[Any] | None:
        """Return the messages that have arrived; None if the node is gone or sends other data.

        Waits up to `limit_s` seconds for data. The list is empty if no message is complete.
        """
        if not self._fill_buffer(limit_s):
            return None
        try:
            return [*iter(self._next_message, None)]
        except MessageError:
            return None

    def wait(self, deadline: float) -> Any | None:
        """Return the next message.

        Returns None if the node is gone or sends other data, or if `deadline` (own_time) passes.
        """
        try:
            while (message := self._next_message()) is None:
                left_s = deadline - own_time.now()
                if left_s <= 0 or not self._fill_buffer(min(left_s, limits.BEAT_S)):
                    return None
            return message
        except MessageError:
            return None

    def _next_message(self) -> Any | None:
        """Return the next complete message, or None. Raises MessageError."""
        line, line_end, rest = self._buffer.partition(b"\n")
        if not line_end:
            return None
        message = messages.read(line)
        if isinstance(message, SnapshotPiece):
            if len(rest) < message.length:
                return None
            message = SnapshotData(message, rest[: message.length])
            rest = rest[len(message.data) :]
        self._buffer = rest  # kept for later
        return message

    def _fill_buffer(self, limit_s: float) -> bool:
        """Read what arrives in time. Returns False if the node is gone or sends too much data."""
        if not wait_for_input([self.socket.fileno()], limit_s):
            return True
        try:
            data = self.socket.recv(65536)
        except OSError as error:
            self._error = error.errno or 0
            return False
        self.heard = time.monotonic()
        self._buffer += data
        return bool(data) and len(self._buffer) <= _MAX_BYTES

    def expect_news(self, within_s: float, pause_s: float) -> None:
        """Begin to listen for heartbeats; the other end may be silent for `pause_s` first."""
        self.heard = time.monotonic() + pause_s
        self.silence_s = within_s

    @property
    def is_silent(self) -> bool:
        """Whether nothing has arrived for so long that the other end is lost."""
        return own_time.since(self.heard) > self.silence_s

    def loss(self, node_rank: int, host: str) -> Failure:
        """Return the failure of the agent at the other end, which is gone or out of reach."""
        fault = "link-lost"
        if self._error in UNREACHABLE:
            cause = f"{os.strerror(self._error)} (network down?)"
        elif self.is_silent:
            why = "its node agent is stopped, or hangs" if self._is_answered() else "network down?"
            cause = f"no heartbeat for {self.silence_s:g} s ({why})"
        else:
            fault = "agent-killed"
            cause = "its node agent is gone"
        return Failure(fault, cause, KILLED, host, node_rank, time.time())

    def _is_answered(self) -> bool:
        """Whether the machine at the other end has acknowledged one of the latest heartbeats."""
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_AT + 4)
        except OSError:
            return False
        return bool(struct.unpack_from("I", info, _LAST_ACK_AT)[0] < 1000 * self.silence_s / 2)

    def close(self) -> None:
        """Close the connection, which the other end notices at once."""
        self.socket.close()


Peers = Mapping[int, Link]  # the other nodes, by node rank


def tell_silences(peers: Peers, hosts: Sequence[str], say: Say) -> None:
    """Report the nodes that have become silent since the last call, and those heard again."""
    for node_rank, peer in peers.items():
        if news := peer.news.note_silence(own_time.since(peer.heard), peer.silence_s):
            say(f"{hosts[node_rank]}: {news}")


class Pulse:
    """A thread that sends an agent's heartbeats, also while its event loop waits for a file system.

    After HELD_UP_S without news of the loop, no more are sent: the agent counts as lost.
    """

    def __init__(self, everyone: Callable[[], Sequence[Link]]) -> None:
        self._everyone = everyone
        self._is_over = False
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self.send_beat(NodeBeat(None))

    def send_beat(self, newest: NodeBeat) -> None:
        """Send this heartbeat at once, and again every BEAT_S until the next call."""
        self._newest = newest
        self._noted = time.monotonic()
        self._news.set()
        if self._everyone() and not self._thread.ident:  # one node needs no thread
            self._thread.start()

    def _send(self) -> None:
        """Send the newest heartbeat every BEAT_S, in the thread, until end() is called."""
        while not self._is_over:
            if time.monotonic() - self._noted < limits.HELD_UP_S:
                for link in self._everyone():
                    link.send(self._newest, may_wait=False)
            self._news.wait(limits.BEAT_S)
            self._news.clear()

    def end(self) -> None:
        """Send no more heartbeats, and wait for the thread to end."""
        self._is_over = True
        self._news.set()
        if self._thread.ident:
            self._thread.join()
