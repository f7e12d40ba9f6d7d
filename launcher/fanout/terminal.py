"""Where a launcher shows what its nodes print, so that a terminal that is stuck delays nobody."""

from __future__ import annotations

import io
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO, TextIO, cast

from launcher.screen import Screen, View, are_one_file
from launcher.wire import limits

BACKLOG_BYTES = 1 << 20  # that a terminal has not taken yet: the loop waits for it
MOST_BYTES = 1 << 24  # of it that are kept for a slow one
_WRITE = 16384  # bytes; of so many it is noted that they were taken


class Terminal(Screen, io.RawIOBase):
    """One of our own streams. A thread writes to it, so that one that is stuck delays nobody."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: deque[bytes] = deque()
        self._size = 0  # bytes not written yet
        self._last = b"\n"  # byte
        self._taken_at = 0.0  # when it last took something
        self._dropped = 0  # lines, since the last notice
        self._changed = threading.Condition()
        self.text: TextIO = io.TextIOWrapper(cast(IO[bytes], self), write_through=True)
        threading.Thread(target=self._write_all, daemon=True).start()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: bytes) -> int:  # type: ignore[override]  # RawIOBase takes any buffer
        """Queue the launcher's own text, however much there is."""
        self.end_line()
        self._add(bytes(data))
        return len(data)

    def queue(self, data: bytes) -> None:
        """Queue output. A slow reader slows the nodes down; one that is stuck loses lines."""
        if self._has_room():
            self._tell_dropped()
            self._add(data)
        else:
            self._dropped += max(1, data.count(b"\n"))

    def _add(self, data: bytes) -> None:
        with self._changed:
            if self._size == 0:
                self._taken_at = time.monotonic()
            self._queue.append(data)
            self._last = data[-1:]
            self._size += len(data)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Whether more can be queued; gives a reader that is behind the time to catch up."""
        with self._changed:
            if self._size > BACKLOG_BYTES and not self._is_stuck():
                self._changed.wait_for(lambda: self._size <= BACKLOG_BYTES, 0.1)
            return self._size <= (BACKLOG_BYTES if self._is_stuck() else MOST_BYTES)

    def _is_stuck(self) -> bool:
        return time.monotonic() - self._taken_at > limits.TERMINAL_STUCK_S

    def drain(self, limit_s: float) -> None:
        """Wait until all is written, for at most so long."""
        self._tell_dropped()
        with self._changed:
            self._changed.wait_for(lambda: self._size == 0, limit_s)

    def _tell_dropped(self) -> None:
        if self._dropped:
            notice = b"... %d lines not shown: the terminal is too slow\n" % self._dropped
            self._dropped = 0
            self._add(notice if self._last == b"\n" else b"\n" + notice)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                data = self._queue.popleft()
            while data:
                try:
                    written = os.write(self._fd, data[:_WRITE])
                except BlockingIOError:  # someone who shares it has set it so
                    select.select([], [self._fd], [])
                    continue
                except OSError:  # nobody reads any more (`| head`), or the disk is full
                    written = len(data)
                data = data[written:]
                with self._changed:
                    self._taken_at = time.monotonic()
                    self._size -= written
                    self._changed.notify_all()


class Terminals:
    """The launcher's stdout and stderr, and the streams of all nodes on them."""

    def __init__(self) -> None:
        self.out = Terminal(1)
        self.err = self.out if are_one_file(1, 2) else Terminal(2)
        self.is_waiting = False  # a line has begun, and is not shown yet
        self._views: list[View] = []

    def show_behind(self, prefix: bytes) -> Callable[[bytes, bool], None]:
        """Return a function that shows one program's output; nothing means the end of a stream."""
        screens = self.out, self.err
        views = [View(screen, is_alone=False, prefix=prefix) for screen in screens]
        self._views += views

        def show(data: bytes, is_error: bool) -> None:
            view, screen = views[is_error], screens[is_error]
            if data:
                view.add(data)
                return
            view.end()
            if screen.open_by is view:
                screen.end_line()

        return show

    def tick(self, now: float) -> None:
        """Show the lines that have begun and do not end.

        `now` is a time before the nodes were last read.
        """
        self.is_waiting = bool([view for view in self._views if view.tick(now)])
