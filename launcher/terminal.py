"""The launcher's own stdout and stderr. A slow or stuck reader does not block the launcher."""

import contextlib
import errno
import io
import os
import select
import stat
import threading
import time
from collections import deque
from typing import IO, TextIO, cast

from launcher.text import count
from launcher.wire import limits

BACKLOG_BYTES = 1 << 20  # not written yet; above this, writers wait briefly
MOST_BYTES = 1 << 24  # kept for a stuck terminal; more is dropped
_WRITE = 16384  # bytes per write; progress is noted after each


class Terminal(io.RawIOBase):
    """One of the launcher's streams. A thread writes what cannot be written at once."""

    open_by: object | None = None  # the stream whose unfinished line it shows

    def __init__(self, fd: int, *, is_instant: bool = False) -> None:
        """`is_instant` means that the descriptor never blocks and is not shared (`open_again`)."""
        self.fd = fd
        self._is_instant = is_instant
        self._queue: deque[bytes] = deque()
        self._size = 0  # bytes not written yet
        self._last = b"\n"  # the last byte queued
        self._taken_at = 0.0  # when the stream last accepted data
        self._dropped = 0  # lines dropped since the last notice
        self._is_lost = False  # a write has failed, as on a full disk
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write_all, daemon=True)
        self.text: TextIO = io.TextIOWrapper(
            cast(IO[bytes], self), errors="backslashreplace", write_through=True
        )

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self.fd)

    def let_go(self) -> None:
        """Close the unshared descriptor in a rank, which has its own streams."""
        if self._is_instant:
            os.close(self.fd)

    def write(self, data: bytes) -> int:  # type: ignore[override]  # RawIOBase takes any buffer
        """Queue the launcher's own text, of any length."""
        self.end_line()
        self._write_or_queue(bytes(data))
        return len(data)

    def show(self, data: bytes, source: object) -> None:
        """Show bytes from a stream, on a new line if another stream's line is unfinished."""
        if not self.is_free_for(source):
            self.end_line()
        self.open_by = None if data.endswith(b"\n") else source
        self.queue(data)

    def is_free_for(self, source: object) -> bool:
        """Whether no stream other than `source` has an unfinished line here."""
        return self.open_by is None or self.open_by is source

    def end_line(self) -> None:
        """End the unfinished line, if there is one."""
        if self.open_by is not None:
            self.open_by = None
            self.queue(b"\n")

    def queue(self, data: bytes) -> None:
        """Queue output. A slow reader slows the ranks down; a stuck reader loses lines."""
        if self._wait_for_room():
            self._tell_dropped()
            self._write_or_queue(data)
        else:
            self._dropped += max(1, data.count(b"\n"))

    def _write_or_queue(self, data: bytes) -> None:
        """Write what an instant terminal accepts at once, and queue the rest for the thread."""
        self._last = data[-1:]
        if self._is_instant and not self._size:  # otherwise it would overtake the queue
            data = data[self._write(data) :]
        if not data:
            return

        with self._changed:
            if self._size == 0:
                self._taken_at = time.monotonic()
            self._queue.append(data)
            self._size += len(data)
            self._changed.notify_all()

        if self._writer.ident is None:
            try:
                self._writer.start()
            except RuntimeError:  # no more threads can start here
                self._write_next()

    def _wait_for_room(self) -> bool:
        """Wait up to 0.1 s for a slow reader to catch up. Returns whether more can be queued."""
        with self._changed:
            is_stuck = time.monotonic() - self._taken_at > limits.TERMINAL_STUCK_S
            if self._size > BACKLOG_BYTES and not is_stuck:
                self._changed.wait_for(lambda: self._size <= BACKLOG_BYTES, 0.1)
            return self._size <= MOST_BYTES

    def drain(self, limit_s: float) -> None:
        """Wait until everything is written, up to a time limit."""
        self._tell_dropped()
        with self._changed:
            self._changed.wait_for(lambda: self._size == 0, limit_s)

    def _tell_dropped(self) -> None:
        """Queue a notice about the lines that were dropped since the last one, if any were."""
        if self._dropped:
            lines = f"{count(self._dropped, 'line')} not shown"
            notice = f"... {lines}: the terminal is too slow\n".encode()
            self._dropped = 0
            self._write_or_queue(notice if self._last == b"\n" else b"\n" + notice)

    def _write(self, data: bytes) -> int:
        """Write some of the data. Returns how many bytes were written, or discarded by an error."""
        try:
            return os.write(self.fd, data)
        except BlockingIOError:  # the terminal or pipe is full
            return 0
        except OSError as error:
            if error.errno != errno.EPIPE:  # the reader is gone, as after `| head`
                self._tell_lost(str(error.strerror))
            return len(data)

    def _tell_lost(self, why: str) -> None:
        """Warn on stderr, once, that a write has failed."""
        if not self._is_lost:
            text = "warning: output cannot be written here from now on; the node logs have it"
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(2, f"{text} ({why}) [log-lost]\n".encode())
        self._is_lost = True

    def _write_all(self) -> None:
        """Write what is queued, in the thread, until this process ends."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
            self._write_next()

    def _write_next(self) -> None:
        """Write the oldest entry of the queue, and wait for the reader as often as needed."""
        data = self._queue.popleft()
        while data:
            written = self._write(data[:_WRITE])
            data = data[written:]
            if not written:
                room = select.poll()  # unlike select(), for any number of a descriptor
                room.register(self.fd, select.POLLOUT)
                room.poll()
                continue
            with self._changed:
                self._taken_at = time.monotonic()
                self._size -= written
                self._changed.notify_all()


def open_again(fd: int) -> Terminal:
    """Reopen a terminal or pipe on a new descriptor that never blocks; use any other file as is.

    Making the given descriptor non-blocking would also affect the shell.
    """
    try:
        if os.isatty(fd) or stat.S_ISFIFO(os.fstat(fd).st_mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            return Terminal(os.open(f"/proc/self/fd/{fd}", flags), is_instant=True)
    except OSError:  # closed, another user's, or without a reader
        pass
    return Terminal(fd)
