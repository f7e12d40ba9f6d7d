"""What the ranks print: whole lines into the node's log, rank 0's output onto the terminal.

A rank writes to pipes; rank 0 writes to a pseudo-terminal where the launcher has a terminal, so
that a progress bar finds one. The agent reads them here and never blocks on a slow terminal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import selectors
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_NOWHERE = Path(os.devnull)
_CHUNK = 65536
_BACKLOG_BYTES = 1 << 20  # of output that the terminal has not taken yet
_MOST_BYTES = 1 << 24  # of it that are kept for a terminal that is stuck
_LONGEST_LINE = 1 << 20  # bytes; a longer one is cut
PROGRESS_S = 5.0  # between two lines in the log of one that redraws itself
_TRACEBACK = re.compile(rb"Traceback \(most recent call last\)|^Fatal Python error")
_TORCHS_WARNING = re.compile(rb"\[[WI]\d{4} ")  # from its C++ side
# Torch looks up the name behind each address of its store, and uses it in messages alone. Where
# no name server answers, this appears on every start; it tells nothing.
_NOISE = re.compile(
    rb"^(\[rank\d+\]:)?\[W[^\n]* socket\.cpp:\d+\] \[c10d\] "
    rb"The hostname of the client socket cannot be retrieved[^\n]*\n",
    re.MULTILINE,
)
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")


def say(text: str) -> None:
    """Print a line of the agent's own to stderr."""
    print(f"node agent: {text}", file=sys.stderr, flush=True)


class NodeLog:
    """`node_<rank>.log`: every rank's lines, each after its rank; knows its own line numbers."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.lines = 0
        if path is not None:
            with path.open("rb") as before:
                self.lines = sum(line.endswith(b"\n") for line in before)
        self._file = (path or _NOWHERE).open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()

    def write(self, rank: int, line: bytes) -> int:
        """Append one line, without its end; returns its number in the file, from 1."""
        self.lines += 1
        try:
            self._file.write(b"[%d] %s\n" % (rank, line))
        except OSError as error:  # a full disk ends the log, not the run
            say(f"{self.path} ends here: {error.strerror}")
            self._file = _NOWHERE.open("ab", buffering=0)
        return self.lines


class Terminal:
    """One of the launcher's own streams, written without ever blocking the caller."""

    def __init__(self, fd: int) -> None:
        self.is_tty = os.isatty(fd)
        self.fd = _open_again(fd) if self.is_tty else fd
        self.is_line_open = False  # the last line shown has not ended
        self._pending = bytearray()
        self._dropped = 0  # bytes, since the last notice
        self._selector: selectors.BaseSelector

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Use this event loop to learn when there is room."""
        self._selector = selector

    def detach(self, limit_s: float) -> None:
        """After the loop, write what is left, for at most `limit_s` seconds."""
        self._drain(limit_s)
        self._rest()

    def write(self, data: bytes) -> None:
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
        self.is_line_open = not data.endswith(b"\n")
        self._pending += data
        if self.fd not in self._selector.get_map():
            try:
                self._selector.register(self.fd, selectors.EVENT_WRITE, self._write_some)
            except PermissionError:  # a plain file: always ready, and cannot be polled
                while self._pending:
                    self._write_some()

    def _write_some(self) -> None:
        """Write what the stream takes now: a ready pipe takes PIPE_BUF bytes."""
        try:
            written = os.write(self.fd, self._pending[:4096])
        except BlockingIOError:
            return
        except OSError:  # the reader has gone (`| head`): the log has it all
            written = len(self._pending)
        del self._pending[:written]
        if not self._pending:
            self._rest()

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
    """Return another descriptor of a terminal, which never blocks; the same where there is none.

    A terminal that is ready may take less than what is written. To make its own descriptor
    non-blocking would change it for the shell, too.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # another user's terminal
        return fd


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
    _logged: float = field(default_factory=time.monotonic, repr=False)  # the last line of a bar
    _logged_text: bytes = field(default=b"", repr=False)  # of the line not yet ended

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
        text = self._partial + data
        is_cut = len(text) > _LONGEST_LINE and b"\n" not in data
        whole = text if is_cut or not data else text[: text.rfind(b"\n") + 1]
        self._partial = text[len(whole) :]
        for line in whole.removesuffix(b"\n").split(b"\n") if whole else ():
            self._end_line(line)
        if self.is_tty:
            self._shorten()
        shown = data if self.is_tty else whole  # to a terminal as it is: the bar draws itself
        if self.terminal is not None and shown:
            self.terminal.write(_drop_noise(shown))
        return bool(data)

    def _shorten(self) -> None:
        """Keep only the newest state of a line that redraws itself; log it every PROGRESS_S."""
        *older, newest = self._partial.split(b"\r")
        if not older:
            return
        self._partial = newest or older[-1] + b"\r"
        if time.monotonic() - self._logged < PROGRESS_S:
            return
        states = (_ESCAPES.sub(b"", state) for state in (newest, *reversed(older)))
        if text := next(filter(None, states), b""):
            self._logged, self._logged_text = time.monotonic(), text
            self.last_line = self.log.write(self.rank, text)

    def _end_line(self, line: bytes) -> None:
        if self.is_tty:
            # What a terminal shows in the end of a line that was drawn several times.
            line = _ESCAPES.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])
            is_logged, self._logged_text = line == self._logged_text, b""
            if not line or is_logged:
                return
        self.last_line = self.log.write(self.rank, line)
        if not _TORCHS_WARNING.match(line):
            self.last_text = line.decode(errors="replace")
        if _TRACEBACK.search(line):
            self.traceback_line = self.last_line

    def drain(self) -> None:
        """Take what a dead rank has left, without waiting for children that hold the pipe."""
        ready = select.poll()
        ready.register(self.fd, select.POLLIN)
        while ready.poll(0) and self.pump():
            pass

    def close(self) -> None:
        os.close(self.fd)


def _drop_noise(data: bytes) -> bytes:
    """Return what a terminal is to show of this; with LOG_LEVEL=DEBUG everything."""
    is_debug = os.environ.get("LOG_LEVEL", "").upper() == "DEBUG"
    return data if is_debug else _NOISE.sub(b"", data)


@contextlib.contextmanager
def without_noise(fd: int) -> Iterator[None]:
    """Hold back what this process itself writes to a descriptor, and drop torch's noise from it."""
    kept = os.dup(fd)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), fd)
        try:
            yield
        finally:
            os.dup2(kept, fd)
            os.close(kept)
            held_back.seek(0)
            with contextlib.suppress(OSError):
                os.write(fd, _drop_noise(held_back.read()))


def open_stream(rank: int, log: NodeLog, terminal: Terminal | None) -> tuple[int, Stream]:
    """One stream of one rank: the file descriptor for the rank, and the agent's reading end."""
    if terminal is not None and terminal.is_tty:
        reader, writer = pty.openpty()
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(terminal.fd, termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(writer, termios.TIOCSWINSZ, size)
        attributes = termios.tcgetattr(writer)
        attributes[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n, once
        termios.tcsetattr(writer, termios.TCSANOW, attributes)
    else:
        reader, writer = os.pipe()
    os.set_blocking(reader, False)
    return writer, Stream(rank, reader, log, terminal)
