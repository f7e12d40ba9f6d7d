"""The ranks' output: complete lines go to the node's log, rank 0's output to the terminal.

A rank writes to pipes. If the launcher has a terminal, rank 0 writes to a pseudo-terminal, so that
progress bars work. The agent reads both here and never blocks on a slow terminal.
"""

import contextlib
import fcntl
import math
import os
import pty
import re
import termios
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.agent.output import noise
from launcher.agent.output.tracebacks import HeldTraceback
from launcher.descriptors import wait_for_input
from launcher.screen import View
from launcher.terminal import Terminal
from launcher.text import open_own, short_host_name, warn
from launcher.wire import limits

_NOWHERE = Path(os.devnull)
_CHUNK = 65536
_TRICKLE = 2048  # bytes
_PAGE = 4096  # bytes; one read of a terminal returns no more, and asking for more costs time
_LONGEST_LINE = 1 << 20  # bytes; a longer one is logged in pieces
_RECENT_LINES = 400  # the Python stacks of all threads, which a crash prints
_RECENT_BYTES = 2000  # of each of these lines
_STATES = 5  # how many of the latest states of a line that redraws itself are kept
_FATAL = b"Traceback (most recent call last)", b"Fatal Python error"
_TRACEBACK = re.compile(rb"Traceback \(most recent call last\)|^Fatal Python error")
_TORCHS_WARNING = re.compile(rb"\[[WI]\d{4} ")  # from its C++ code
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")


def say(text: str) -> None:
    """Print one of the agent's own messages to stderr."""
    warn(f"node agent: {text}")


class LogFile:
    """An unbuffered file for output. A full disk ends the file, with one warning, not the run."""

    def __init__(self, path: Path | None, mode: str) -> None:
        """Open it in mode "ab" or "wb"; without a path, keep nothing. Raises OSError."""
        self.path = path
        self.is_kept = path is not None  # everything written so far is in the file
        self._file = open_own(path or _NOWHERE, mode, buffering=0)

    def append(self, data: bytes) -> None:
        """Write all of the data; after a failure, nothing more is written."""
        rest = memoryview(data)
        try:
            while rest and self.is_kept:  # an almost full disk accepts only a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        """Close the file. Some file systems, such as NFS, report only now that they are full."""
        try:
            self._file.close()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Warn, once, that the file lacks output."""
        if self.is_kept:
            what = f"{short_host_name()}: {self.path} is incomplete from here ({error.strerror})"
            say(f"warning: {what}; the run continues [log-lost]")
        self.is_kept = False


class NodeLog(LogFile):
    """`node_<node rank>.log`: every rank's lines, each prefixed with the rank, and their number."""

    def __init__(self, path: Path | None) -> None:
        """Continue the log, which may exist. Without a path, only count. Raises OSError."""
        with open_own(path or _NOWHERE, "rb") as before:
            self.lines: int = sum(line.endswith(b"\n") for line in before)
        super().__init__(path, "ab")

    def write(self, rank: int, lines: Sequence[bytes]) -> int:
        """Append lines that lack newlines. Returns the last one's line number, counted from 1.

        Lines that are lost are counted, too.
        """
        self.lines += len(lines)
        head = b"[%d] " % rank
        self.append(head + (b"\n" + head).join(lines) + b"\n")
        return self.lines


class RankView(View):
    """A rank's stream on the terminal, with torch's noise dropped and tracebacks held back."""

    def __init__(self, screen: Terminal, *, is_alone: bool, label: bytes, is_debug: bool) -> None:
        """Begin each line with a label, such as `[rank3] `, in place of torch's own `[rank3]: `.

        With `is_debug`, also show torch's noise.
        """
        super().__init__(screen, is_alone=is_alone, prefix=label)
        self.traceback = HeldTraceback()
        self._is_debug = is_debug
        name = re.escape(label.rstrip(b": "))
        self._torchs_label = re.compile(rb"^%s: " % name, re.M) if name else None

    def may_be_dropped(self, line: bytes) -> bool:
        return noise.may_begin(line)

    def clean(self, data: bytes) -> bytes:
        data = noise.drop(data, is_debug=self._is_debug)
        return self._torchs_label.sub(b"", data) if self._torchs_label else data

    def put(self, data: bytes) -> None:
        if shown := self.traceback.hold_back(data):
            super().put(shown)

    def show_traceback(self) -> None:
        """Show the traceback that is held back."""
        self._since = time.monotonic()
        if held := self.traceback.release():
            super().put(held)

    def show_held(self, now: float, traceback_s: float = math.inf) -> bool:
        """Do what View.show_held() does, and show a traceback that is `traceback_s` seconds old."""
        if self.traceback.age(now) >= traceback_s:
            self.show_traceback()
        return super().show_held(now) or bool(self.traceback.text)


@dataclass
class Stream:
    """One rank's stdout or stderr: the read end, and the bytes of the unfinished line."""

    rank: int
    fd: int
    log: NodeLog
    view: RankView | None = None  # None if this rank is not shown
    is_tty: bool = False
    copy: LogFile | None = None  # the stream's own file
    is_trickle: bool = False  # the last read returned little
    traceback_line: int = 0  # where the last traceback starts in the log; 0 if none
    last_line: int = 0
    _last_said: bytes = b""  # the text of the last line that is no warning of torch's
    _recent: deque[bytes] = field(default_factory=lambda: deque(maxlen=_RECENT_LINES))
    _partial: bytearray = field(default_factory=bytearray)  # a progress bar if it has a \r
    _logged: float = field(default_factory=time.monotonic)  # when a bar was last logged
    _logged_text: bytes = b""  # the state of the bar that was last logged

    @property
    def last_text(self) -> str:
        """The last line that is not a warning from torch's C++ code."""
        return self._last_said.decode(errors="replace")

    @property
    def recent_lines(self) -> list[str]:
        """The last lines, each shortened."""
        return [line.decode(errors="replace") for line in self._recent]

    def pump(self) -> bool:
        """Read what is available; log it, show it, and write it to the stream's own file.

        Never blocks. Sets `is_trickle`. Returns False at the end of the stream.
        """
        data = self._read()
        self.is_trickle = 0 < len(data or b"") < _TRICKLE
        if data is None:
            return True

        if self.copy:
            self.copy.append(data)
        self._log(data)
        if self.view:
            self.view.add(data)
            if not data:
                self.view.end()
        return bool(data)

    def _read(self) -> bytes | None:
        """Return what is available: empty at the end of the stream, None if nothing is ready."""
        data = b""
        try:
            data = more = os.read(self.fd, _PAGE if self.is_tty else _CHUNK)
            # A full page: there may be more. A terminal may return a byte less.
            while self.is_tty and len(more) >= _PAGE - 1 and len(data) < _CHUNK:
                data += (more := os.read(self.fd, _PAGE))
        except BlockingIOError:
            return data or None
        except OSError:  # a pseudo-terminal raises this when the other end is closed
            pass
        return data

    def _log(self, data: bytes) -> None:
        """Log the finished lines, and keep the unfinished one until it ends or is too long.

        Of a line that redraws itself, only the latest states are kept. Empty `data` means the end
        of the stream.
        """
        head, end, tail = data.rpartition(b"\n")
        if end:
            self._log_lines(head)
        self._partial += tail
        if b"\r" in tail:
            self._partial = bytearray(b"\r").join(self._partial.rsplit(b"\r", _STATES)[-_STATES:])
        if self._partial and (not data or len(self._partial) > _LONGEST_LINE):
            self._log_lines(b"")

    def show_held(self, now: float, traceback_s: float = math.inf) -> bool:
        """Show output that has been held back for long enough, and log a line that redraws itself.

        Returns whether any remains to be shown or logged. Of such a line, the newest state is
        logged, every REDRAW_S. `now` is a time before the stream was last read. A traceback is
        shown after `traceback_s`.
        """
        is_waiting = self.view is not None and self.view.show_held(now, traceback_s)
        if b"\r" not in self._partial:
            return is_waiting

        state = _newest_state(bytes(self._partial))
        if not state or state == self._logged_text:
            return is_waiting
        if now - self._logged >= limits.REDRAW_S:
            self._logged = now
            self._logged_text = state
            self.last_line = self.log.write(self.rank, [state])
        return True

    def _log_lines(self, text: bytes) -> None:
        """Log the unfinished line and the lines of `text`, which lacks the last newline.

        Keeps what a failure will need: the last lines, and the numbers in the log of the last line
        and of the line with which the last traceback begins.
        """
        whole = bytes(self._partial + text)
        logged = self._logged_text
        self._logged_text = b""
        self._partial.clear()

        lines = whole.split(b"\n")
        if self.is_tty or b"\r" in whole:
            lines = [*self._clean(lines)]
            if logged and lines[:1] == [logged]:  # show_held() has logged it
                del lines[0]
        if not lines:
            return

        self.last_line = self.log.write(self.rank, lines)
        self._recent.extend(line[:_RECENT_BYTES] for line in lines[-_RECENT_LINES:])
        said = (line for line in reversed(lines) if not _TORCHS_WARNING.match(line))
        self._last_said = next(said, self._last_said)

        if any(mark in whole for mark in _FATAL):
            for number, line in enumerate(lines, self.last_line - len(lines) + 1):
                if _TRACEBACK.search(line):
                    self.traceback_line = number

    def _clean(self, lines: Sequence[bytes]) -> Iterator[bytes]:
        """Yield lines as a terminal finally shows them; a pipe's lines change only if redrawn."""
        for line in lines:
            if not self.is_tty and b"\r" not in line:
                yield line
            elif state := _newest_state(line):
                yield state

    def drain(self) -> None:
        """Read what a dead rank left, without waiting for children that hold the pipe open."""
        while wait_for_input([self.fd], 0) and self.pump():
            pass

    def end(self, *, is_consequence: bool = False) -> None:
        """Read and show the rest, then close the stream.

        A traceback that follows from another rank's failure is not shown, if the log has it.
        """
        self.drain()
        self._log(b"")
        if self.view:
            self.view.end()
            if not (is_consequence and self.log.is_kept):
                self.view.show_traceback()
        self.close()

    def close(self) -> None:
        os.close(self.fd)
        if self.copy:
            self.copy.close()


def _newest_state(line: bytes) -> bytes:
    """Return the last visible state of a line that was redrawn, even if it was then cleared.

    Returns no bytes if nothing of it was ever visible. Escape sequences are removed.
    """
    end = len(line)
    while end >= 0:
        start = line.rfind(b"\r", 0, end)
        state = line[start + 1 : end]
        if b"\x1b" in state:  # otherwise skip the slow search
            state = _ESCAPES.sub(b"", state)
        if state.strip():
            return state
        end = start
    return b""


def open_stream(rank: int, log: NodeLog, terminal: Terminal | None) -> tuple[int, Stream]:
    """Open one stream of a rank. Returns the rank's descriptor, and the agent's reading end.

    If `terminal` is a real one, the rank gets a pseudo-terminal of the same size, otherwise a pipe.
    Reading never blocks.
    """
    is_tty = False
    if terminal is not None and terminal.isatty():
        with contextlib.suppress(OSError, termios.error):  # no pseudo-terminals here
            reader, writer = _open_pty(terminal)
            is_tty = True
    if not is_tty:
        reader, writer = os.pipe()

    os.set_blocking(reader, False)
    return writer, Stream(rank, reader, log, is_tty=is_tty)


def _open_pty(like: Terminal) -> tuple[int, int]:
    """Open a pseudo-terminal of the same size. Returns the end to read from, and the rank's end.

    Raises OSError or termios.error if there is none here.
    """
    reader, writer = pty.openpty()
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(like.fd, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(writer, termios.TIOCSWINSZ, size)
    attributes = termios.tcgetattr(writer)
    attributes[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n, once
    termios.tcsetattr(writer, termios.TCSANOW, attributes)
    return reader, writer
