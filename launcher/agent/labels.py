"""The output of several ranks on one terminal: each line begins with its rank."""

from __future__ import annotations

import re

from launcher.agent.output import Terminal

_STARTS = re.compile(rb"(?<=[\r\n])(?=[^\r\n])")  # of the lines after the first


class Labels:
    """One of the launcher's streams, which several ranks share."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self._writer = -1  # the rank whose line is open; -1: none is
        self._is_at_start = True
        self._cut: set[int] = set()  # ranks whose line another one has ended

    def write(self, rank: int, data: bytes) -> None:
        """Show what a rank has written; a line that another rank has begun ends here."""
        before = b""
        if self._writer not in (-1, rank):
            before = b"\n"
            self._cut.add(self._writer)
            self._writer = -1
        if rank in self._cut and data:
            self._cut.remove(rank)
            data = data.removeprefix(b"\n")
        if data:
            label = b"[%d] " % rank
            is_new = self._writer == -1 or self._is_at_start
            before += label if is_new else b""
            self._writer = -1 if data.endswith(b"\n") else rank
            self._is_at_start = data[-1:] in (b"\r", b"\n")
            data = _STARTS.sub(label, data)
        self.terminal.write(before + data)


class LabelledTerminal(Terminal):
    """The same stream as one rank's."""

    def __init__(self, labels: Labels, rank: int) -> None:
        self.is_tty = False  # each rank writes to a pipe
        self.fd = labels.terminal.fd
        self._labels = labels
        self._rank = rank

    def write(self, data: bytes) -> None:
        """Show it with its rank."""
        self._labels.write(self._rank, data)
