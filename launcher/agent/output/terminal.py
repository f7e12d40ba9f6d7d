"""The terminal or pipe that the launcher was started on, written without ever blocking."""

from __future__ import annotations

import os
import select
import selectors
import stat
import time

from launcher.screen import Screen

_BACKLOG_BYTES = 1 << 20  # of output that the terminal has not taken yet
_MOST_BYTES = 1 << 24  # of it that are kept for a terminal that is stuck


class Terminal(Screen):
    """One of the launcher's own streams, written without ever blocking the caller."""

    def __init__(self, fd: int) -> None:
        self.is_tty = os.isatty(fd)
        self._given = fd
        self.fd = _open_again(fd)
        self._most = 1 << 16 if self.fd != fd else select.PIPE_BUF  # bytes of one write
        self._pending = bytearray()
        self._dropped = 0  # bytes, since the last notice
        self._selector: selectors.BaseSelector

    def close(self) -> None:
        """Close what was opened here; for ranks, which have their own streams."""
        if self.fd != self._given:
            os.close(self.fd)

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Use this event loop to learn when there is room."""
        self._selector = selector
        self.open_by = None  # what came after the attempt before has begun a line

    def detach(self, limit_s: float) -> None:
        """After the loop, write what is left, for at most `limit_s` seconds."""
        self._drain(limit_s)
        self._rest()

    def queue(self, data: bytes) -> None:
        """Queue it. A slow reader slows the ranks down; one that is stuck loses output."""
        if len(self._pending) > _MOST_BYTES:
            self._dropped += len(data)
            return
        if len(self._pending) > _BACKLOG_BYTES:
            self._drain(limit_s=0.1)  # and the agent still hears others
        if self._dropped:
            notice = f"\n... {self._dropped} bytes not shown: the terminal is too slow\n"
            self._pending += notice.encode()
            self._dropped = 0
        if self.fd != self._given and not self._pending:
            data = data[self._write(data) :]
        self._pending += data
        if self._pending and self.fd not in self._selector.get_map():
            try:
                self._selector.register(self.fd, selectors.EVENT_WRITE, self._write_some)
            except PermissionError:  # a plain file: always ready, and cannot be polled
                while self._pending:
                    self._write_some()

    def _write_some(self) -> None:
        """Write what the stream takes now: a ready pipe that blocks takes PIPE_BUF bytes."""
        with memoryview(self._pending) as waiting, waiting[: self._most] as some:
            written = self._write(some)
        del self._pending[:written]
        if not self._pending:
            self._rest()

    def _write(self, data: bytes | memoryview) -> int:
        """Return how many bytes are done with."""
        try:
            return os.write(self.fd, data)
        except BlockingIOError:
            return 0
        except OSError:  # the reader has gone (`| head`): the log has it all
            return len(data)

    def _drain(self, limit_s: float) -> None:
        """Write everything, for at most `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        room = select.poll()
        room.register(self.fd, select.POLLOUT)
        while self._pending and time.monotonic() < deadline:
            if room.poll(50):
                self._write_some()

    def _rest(self) -> None:
        """Leave the event loop."""
        if self.fd in self._selector.get_map():
            self._selector.unregister(self.fd)


def _open_again(fd: int) -> int:
    """Return another descriptor of a terminal or pipe, which never blocks; else the same.

    A terminal that is ready may take less than what is written. To make its own descriptor
    non-blocking would change it for the shell, too.
    """
    try:
        if not (os.isatty(fd) or stat.S_ISFIFO(os.fstat(fd).st_mode)):
            return fd
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # closed, another user's, or nobody reads
        return fd
