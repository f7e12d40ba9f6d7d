"""Several ranks on one terminal: whose line it is."""

from __future__ import annotations

import pytest

from launcher.agent.labels import LabelledTerminal, Labels
from launcher.agent.output import Terminal


class Shown(Terminal):
    """A terminal that keeps what it shows."""

    def __init__(self) -> None:
        self.fd = 1
        self.text = b""

    def write(self, data: bytes) -> None:
        self.text += data


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([(0, b"a\nb\n"), (11, b"c\n")], b"[0] a\n[0] b\n[11] c\n"),
        ([(0, b"a"), (0, b"b\n"), (0, b"c\n")], b"[0] ab\n[0] c\n"),  # in several pieces
        ([(0, b"a"), (1, b"b\n"), (0, b"\n"), (0, b"c\n")], b"[0] a\n[1] b\n[0] c\n"),
        ([(0, b"a"), (1, b"b\n"), (0, b"c\n")], b"[0] a\n[1] b\n[0] c\n"),
        ([(0, b"1%\r2%\r"), (0, b"3%\r\n")], b"[0] 1%\r[0] 2%\r[0] 3%\r\n"),  # a progress bar
        ([(0, b"a\n\nb\n")], b"[0] a\n\n[0] b\n"),
    ],
)
def test_each_line_begins_with_its_rank(written: list[tuple[int, bytes]], expected: bytes) -> None:
    shown = Shown()
    labels = Labels(shown)
    for rank, data in written:
        LabelledTerminal(labels, rank).write(data)
    assert shown.text == expected


def test_a_rank_on_a_shared_terminal_writes_to_a_pipe() -> None:
    assert not LabelledTerminal(Labels(Shown()), 3).is_tty
