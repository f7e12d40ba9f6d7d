"""Several streams on one terminal or pipe: bytes are shown as they arrive, and lines never mix."""

import os
import re
import time

from launcher.terminal import Terminal
from launcher.wire import limits

_REDRAWN = re.compile(rb"\r(\x1b\[[0-2]?K)*")  # clearing the line would also clear a prefix
LONGEST_HELD = 1 << 16  # bytes of an unfinished line; a longer one is shown at once


class View:
    """One stream on a screen.

    If it is the only one, its bytes are shown as they arrive. Otherwise, complete lines are shown
    at once. An unfinished line is shown after PARTIAL_S if no other is open, and then as it grows.
    """

    def __init__(self, screen: Terminal, *, is_alone: bool, prefix: bytes) -> None:
        """Begin each line, and each state of a line that redraws itself, with the prefix."""
        self._screen = screen
        self._is_alone = is_alone
        self._source = screen if is_alone else self  # one rank may mix its two streams
        self._prefix = prefix
        self._held = b""  # the start of a line, not shown yet
        self._since = 0.0  # when it arrived
        self._is_redrawn = False  # the last byte shown was \r

    def may_be_dropped(self, line: bytes) -> bool:
        """Whether clean() might drop a line that starts like this, as it does in a subclass."""
        return False

    def clean(self, data: bytes) -> bytes:
        """Return the part of the data that is to be shown: all, unless a subclass drops lines."""
        return data

    def add(self, data: bytes) -> None:
        """Show what the stream has written; hold an unfinished line that would mix with others.

        Of a progress bar that would be held for too long, only the newest state is kept.
        """
        text = self._held + data
        start = text.rfind(b"\n") + 1
        held = self._choose_held(text[start:])
        shown = text[:start] if held else text

        if shown or not self._held:
            self._since = time.monotonic()
        self._held = held
        self._show(shown)

    def _choose_held(self, line: bytes) -> bytes:
        """Return the part of an unfinished line to hold: nothing, all, or a bar's newest state."""
        is_mine = self._is_alone or self._screen.open_by is self
        if is_mine and not self.may_be_dropped(line):
            return b""
        if len(line) <= LONGEST_HELD:
            return line

        is_free = self._screen.is_free_for(self)  # no other stream's line is unfinished
        newest = line.rfind(b"\r", 0, -1)  # each state of a progress bar may end with \r, too
        return b"" if is_free or newest < 0 else line[newest:]

    def show_held(self, now: float) -> bool:
        """Show text that has been held long enough. Returns whether any is still held.

        `now` must be a time before the last read: all text written by then has been added.
        """
        is_due = self._held and now - self._since >= limits.PARTIAL_S
        if is_due and self._screen.is_free_for(self._source):
            self.end()
        return bool(self._held)

    def end(self) -> None:
        """Show the text that is held."""
        line = self._held
        self._held = b""
        self._show(line)

    def _show(self, data: bytes) -> None:
        """Show what clean() leaves of the data, if anything."""
        if data := self.clean(data):
            self.put(data)

    def put(self, data: bytes) -> None:
        """Show data on the screen, with the prefix."""
        shown = self._begin_lines(data) if self._prefix else data
        self._is_redrawn = data.endswith(b"\r")
        self._screen.show(shown, self._source)

    def _begin_lines(self, data: bytes) -> bytes:
        """Return data with the prefix before each line, and before each state of a redrawn line.

        If the last byte ends a line or a state, the next call adds the prefix that follows it.
        """
        prefix = self._prefix
        is_next_state = self._is_redrawn and not data.startswith(b"\n")
        is_new = is_next_state or self._screen.open_by is not self
        data, last = data[:-1], data[-1:]
        data = _REDRAWN.sub(rb"\g<0>" + prefix, data.replace(b"\n", b"\n" + prefix))
        data = data.replace(b"\r" + prefix + b"\n", b"\r\n")
        if last == b"\n" and data.endswith(b"\r" + prefix):
            data = data.removesuffix(prefix)
        return (prefix if is_new else b"") + data + last


def has_one_screen() -> bool:
    """Whether stdout and stderr are the same file, as after 2>&1."""
    try:
        return os.path.sameopenfile(1, 2)
    except OSError:  # one is closed
        return False
