"""What the ranks print: whole lines into the node's log, rank 0's progress onto the terminal.

A rank writes to pipes, or rank 0 to a pseudo-terminal where the launcher has a terminal, so that
a progress bar finds one. The agent reads them here and never blocks on a terminal that is slow.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import selectors
import sys
import termios
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

_CHUNK = 65536
_BACKLOG_BYTES = 1 << 20  # of output that the terminal has not taken yet
_TRACEBACK = re.compile(rb"Traceback \(most recent call last\)|^Fatal Python error")
_TORCHS_WARNING = re.compile(rb"\[[WI]\d{4} ")  # from its C++ side
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")


class NodeLog:
    """`node_<rank>.log`: every rank's lines, each behind its rank; knows its own line numbers."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.lines = 0
        self._file: BinaryIO | None = None
        if path is not None:
            if path.exists():
                with path.open("rb") as before:
                    self.lines = sum(
                        chunk.count(b"\n") for chunk in iter(lambda: before.read(_CHUNK), b"")
                    )
            self._file = path.open("ab", buffering=0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, rank: int, line: bytes) -> int:
        """Append one line, without its end; returns its number in the file, from 1."""
        self.lines += 1
        if self._file is not None:
            try:
                self._file.write(b"[%d] %s\n" % (rank, line))
            except OSError as error:  # a full disk ends the log, not the run
                print(f"node agent: {self.path} ends here: {error.strerror}", file=sys.stderr)
                self._file = None
        return self.lines


class Terminal:
    """One of the launcher's own streams, written without ever blocking the caller."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_tty = os.isatty(fd)
        self._selector: selectors.BaseSelector
        self._pending: deque[bytes] = deque()
        self._size = 0
        self._watched = False
        self.is_line_open = False  # the last line shown has not ended

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Let this loop say when there is room."""
        self._selector = selector

    def detach(self, limit_s: float) -> None:
        """The loop is over: write what is left, for at most `limit_s` seconds."""
        self.drain(limit_s)
        if self._watched:
            self._selector.unregister(self.fd)
            self._watched = False

    def write(self, data: bytes) -> None:
        self.is_line_open = not data.endswith(b"\n")
        self._pending.append(data)
        self._size += len(data)
        if self._size > _BACKLOG_BYTES:
            self.drain(limit_s=0.1)  # slows the ranks down, yet leaves the agent its senses
        if not self._watched:
            try:
                self._selector.register(self.fd, selectors.EVENT_WRITE, self.flush_ready)
                self._watched = True
            except PermissionError:  # a plain file: always ready, and cannot be polled
                while self._pending:
                    self.flush_ready()

    def flush_ready(self) -> None:
        """Write what the stream takes now: a ready pipe or terminal takes PIPE_BUF bytes."""
        data = self._pending.popleft()
        try:
            written = os.write(self.fd, data[:4096])
        except OSError:  # nobody reads any more (`| head`): the log has it all
            self._pending.clear()
            self._size = written = 0
        else:
            self._size -= written
            if written < len(data):
                self._pending.appendleft(data[written:])
        if not self._pending and self._watched:
            self._selector.unregister(self.fd)
            self._watched = False

    def drain(self, limit_s: float) -> None:
        """Write everything, for at most `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while self._pending and time.monotonic() < deadline:
            with selectors.PollSelector() as ready:
                ready.register(self.fd, selectors.EVENT_WRITE)
                if ready.select(0.05):
                    self.flush_ready()


@dataclass
class Stream:
    """One rank's stdout or stderr: the read end, and the bytes of a line not yet ended."""

    rank: int
    fd: int
    log: NodeLog
    terminal: Terminal | None  # None: this rank is not shown
    traceback_line: int = 0  # of the last traceback's start in the log, 0 if there was none
    last_line: int = 0
    last_text: str = ""
    _partial: bytes = field(default=b"", repr=False)

    @property
    def is_tty(self) -> bool:
        return self.terminal is not None and self.terminal.is_tty

    def pump(self) -> bool:
        """Take what is there; False at the end of the stream."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return True
        except OSError:  # a pseudo-terminal's way of saying that the other end is closed
            data = b""
        if not data:
            if self._partial:
                self._end_line(self._partial)
                if self.terminal is not None and not self.is_tty:
                    self.terminal.write(self._partial)
                self._partial = b""
            return False
        if self.terminal is not None and self.terminal.is_tty:
            self.terminal.write(data)  # as it is: the bar draws itself
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._end_line(line)
        if lines and self.terminal is not None and not self.is_tty:
            self.terminal.write(b"\n".join(lines) + b"\n")
        return True

    def _end_line(self, line: bytes) -> None:
        if self.is_tty:  # what a reader of the terminal would have seen in the end
            line = _ESCAPES.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])
            if not line:
                return
        self.last_line = self.log.write(self.rank, line)
        if not _TORCHS_WARNING.match(line):
            self.last_text = line.decode(errors="replace")
        if _TRACEBACK.search(line):
            self.traceback_line = self.last_line

    def drain(self) -> None:
        """Take what a dead rank has left, without waiting for children that hold the pipe."""
        while _has_bytes(self.fd) and self.pump():
            pass

    def close(self) -> None:
        os.close(self.fd)


def _has_bytes(fd: int) -> bool:
    with selectors.PollSelector() as ready:
        ready.register(fd, selectors.EVENT_READ)
        return bool(ready.select(0))


def open_stream(rank: int, log: NodeLog, terminal: Terminal | None) -> tuple[int, Stream]:
    """One stream of one rank: the file descriptor for the rank, and the agent's reading end."""
    if terminal is not None and terminal.is_tty:
        reader, writer = pty.openpty()
        _copy_window_size(terminal.fd, writer)
        attributes = termios.tcgetattr(writer)
        attributes[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n, once
        termios.tcsetattr(writer, termios.TCSANOW, attributes)
    else:
        reader, writer = os.pipe()
    os.set_blocking(reader, False)
    return writer, Stream(rank, reader, log, terminal)


def _copy_window_size(source: int, target: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(target, termios.TIOCSWINSZ, fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8))
