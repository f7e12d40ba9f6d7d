"""Lines that several ranks write at about the same time, shown once: `[rank0-7] a warning`.

A whole line waits until every rank has written it, for WAIT_S at most, and what its rank writes
next waits behind it. So the lines of each rank stay in their order.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.screen import Screen
from launcher.text import list_ranks

# Ranks in step write equal lines within milliseconds, at the start within tenths of a second. A
# user who watches progress does not notice the wait.
WAIT_S = 0.2
MOST_BYTES = 1 << 15  # at once, and per second, of one rank; more is shown as it comes


@dataclass
class Writer:
    """One rank, whichever of its streams it writes to."""

    rank: int
    since: float = math.inf  # when the oldest of its lines that wait came
    lines: deque[tuple[float, bytes]] = field(default_factory=deque)  # that wait: since when, text
    texts: Counter[bytes] = field(default_factory=Counter)  # of these lines
    _written: float = 0.0  # bytes; each second takes MOST_BYTES off it
    _at: float = 0.0  # when it last wrote

    def is_flood(self, size: int, now: float) -> bool:
        """Whether a rank that now writes so many bytes writes too much to be compared."""
        written = self._written - (now - self._at) * MOST_BYTES
        written = size + written if written > 0.0 else size  # max() and min() take twice as long
        self._written = written if written < 2 * MOST_BYTES else 2 * MOST_BYTES
        self._at = now
        return written > MOST_BYTES

    def add_last(self, text: bytes, now: float) -> None:
        self.since = min(self.since, now)
        self.lines.append((now, text))
        self.texts[text] += 1

    def is_next(self, text: bytes) -> bool:
        return bool(self.lines) and self.lines[0][1] == text

    def drop_next(self) -> None:
        """Drop its oldest line, which is shown."""
        _, text = self.lines.popleft()
        self.since = self.lines[0][0] if self.lines else math.inf
        self.texts[text] -= 1
        if not self.texts[text]:
            del self.texts[text]


class EqualLines:
    """The whole lines of several ranks on one screen."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._writers: dict[int, Writer] = {}  # by rank
        self._shown: list[bytes] = []  # lines with their labels, on their way to the screen

    def join(self, rank: int) -> Writer:
        """Expect lines of this rank."""
        return self._writers.setdefault(rank, Writer(rank))

    def add(self, writer: Writer, data: bytes, now: float) -> None:
        """Take whole lines, and show those that every rank has written."""
        torchs_label = b"[rank%d]: " % writer.rank
        for line in data[:-1].split(b"\n"):
            text = line.removeprefix(torchs_label)
            writer.add_last(text, now)
            if all(text in one.texts for one in self._writers.values()):
                number = writer.texts[text]
                while writer.texts[text] == number:
                    self._show_next(self._oldest())
        self._flush()

    def tick(self, now: float) -> bool:
        """Show what has waited for long enough; returns whether something waits."""
        while (oldest := self._oldest()).since <= now - WAIT_S:
            self._show_next(oldest)
        self._flush()
        return any(one.lines for one in self._writers.values())

    def show_all_of(self, writer: Writer) -> None:
        """Show all lines of a rank, and older ones of others."""
        while writer.lines:
            self._show_next(self._oldest())
        self._flush()

    def show_all(self) -> None:
        for writer in self._writers.values():
            self.show_all_of(writer)

    def _oldest(self) -> Writer:
        """Return the rank whose next line has waited longest."""
        return min(self._writers.values(), key=operator.attrgetter("since"))

    def _show_next(self, writer: Writer) -> None:
        """Show the next line of a rank, with all who wrote it; first what these wrote before it."""
        text = writer.lines[0][1]
        equal = [one for one in self._writers.values() if text in one.texts]
        for one in equal:
            while not one.is_next(text):
                before = one.lines[0][1]
                self._show(
                    before, [each for each in self._writers.values() if each.is_next(before)]
                )
        self._show(text, equal)

    def _show(self, text: bytes, writers: Sequence[Writer]) -> None:
        self._shown.append(label(tuple(sorted(one.rank for one in writers))) + text)
        for one in writers:
            one.drop_next()

    def _flush(self) -> None:
        if self._shown:
            self._screen.show(b"\n".join(self._shown) + b"\n", self)
            self._shown.clear()


@functools.lru_cache(maxsize=64)
def label(ranks: Sequence[int]) -> bytes:
    """Return what begins a line of these ranks: `[rank3] `, `[rank0-2,5] `."""
    return b"[rank%s] " % list_ranks(ranks, ",").encode()
