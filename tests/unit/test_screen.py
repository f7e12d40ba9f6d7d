"""Several streams on one terminal: whole lines at once, the start of one after a short time."""

from __future__ import annotations

import time

import pytest

from launcher.agent.output.stream import RankView
from launcher.screen import LONGEST_HELD, Screen, View
from launcher.wire import limits


class Sheet(Screen):
    """A screen that keeps what it is given."""

    def __init__(self) -> None:
        self.text = b""

    def queue(self, data: bytes) -> None:
        self.text += data


@pytest.fixture
def sheet() -> Sheet:
    return Sheet()


def several(sheet: Sheet, number: int = 2, *, has_prefix: bool = False) -> list[View]:
    """Return views of so many streams, after which the screen is theirs."""
    prefixes = [b"[%d] " % each if has_prefix else b"" for each in range(number)]
    return [View(sheet, is_alone=False, prefix=prefix) for prefix in prefixes]


def later() -> float:
    return time.monotonic() + limits.PARTIAL_S + 0.001


def test_a_stream_that_is_alone_shows_each_byte_at_once(sheet: Sheet) -> None:
    out, err = (View(sheet, is_alone=True) for _ in range(2))
    out.add(b"Name? ")
    err.add(b"10%\r")
    out.add(b"x\ny")
    assert sheet.text == b"Name? 10%\rx\ny"


def test_lines_written_in_pieces_stay_whole(sheet: Sheet) -> None:
    one, two = several(sheet)
    for piece in (b"loss", b" ", b"0.5", b"\n"):
        one.add(piece)
        two.add(piece)
    assert sheet.text == b"loss 0.5\nloss 0.5\n"


def test_a_prompt_is_shown_after_a_short_time_and_then_as_it_grows(sheet: Sheet) -> None:
    one, _ = several(sheet)
    one.add(b"Name")
    assert one.tick(time.monotonic()) and sheet.text == b""
    assert not one.tick(later()) and sheet.text == b"Name"
    one.add(b"? ")
    assert sheet.text == b"Name? "


def test_a_line_of_another_begins_a_line(sheet: Sheet) -> None:
    one, two = several(sheet)
    one.add(b"10%")
    one.tick(later())
    two.add(b"warned\n")
    one.add(b"\r20%")
    one.tick(later())
    assert sheet.text == b"10%\nwarned\n\r20%"


def test_a_second_bar_waits_for_the_first(sheet: Sheet) -> None:
    one, two = several(sheet)
    one.add(b"\r10%")
    one.tick(later())
    for _ in range(3 * LONGEST_HELD // 1000):
        two.add(b"\r50%" * 250)
    assert two.tick(later()) and sheet.text == b"\r10%"
    assert len(two._held) <= 2 * LONGEST_HELD
    one.add(b"\n")
    two.tick(later())
    assert sheet.text.startswith(b"\r10%\n\r50%")


def test_a_long_line_is_shown_in_pieces(sheet: Sheet) -> None:
    one, two = several(sheet)
    one.add(b"x" * (LONGEST_HELD + 1))
    two.add(b"y" * (LONGEST_HELD + 1))
    assert sheet.text == b"x" * (LONGEST_HELD + 1) + b"\n" + b"y" * (LONGEST_HELD + 1)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_each_line_and_each_state_of_a_bar_has_its_prefix(sheet: Sheet, size: int) -> None:
    one, two = several(sheet, has_prefix=True)
    text = b"a\n\nb\r\n\rbar 1\rbar 2\r\nc"
    for at in range(0, len(text), size):
        one.add(text[at : at + size])
        one.tick(later())
    two.add(b"d\n")
    one.add(b"e\n")
    shown = sheet.text.replace(b"\r[0] \n", b"\r\n").replace(b"[0] \r", b"\r")
    expected = b"[0] a\n[0] \n[0] b\r\n\r[0] bar 1\r[0] bar 2\r\n[0] c\n[1] d\n[0] e\n"
    assert shown == expected


@pytest.mark.parametrize("clear", [b"\r\x1b[2K", b"\r\x1b[K", b"\x1b[2K\r", b"\r\x1b[0K\x1b[1K"])
def test_a_bar_that_clears_its_line_keeps_its_prefix(sheet: Sheet, clear: bytes) -> None:
    one, two = several(sheet, has_prefix=True)
    for state in (b"10%", b"20%"):
        one.add(clear + state)
        one.tick(later())
    assert sheet.text == b"[0] " + clear + b"[0] 10%" + clear + b"[0] 20%"
    two.add(b"x\n")
    one.add(clear + b"done\n")
    assert sheet.text.endswith(b"20%\n[1] x\n[0] " + clear + b"[0] done\n")


def test_lines_of_ranks_with_labels_stay_apart() -> None:
    sheet = Sheet()
    one, two = (RankView(sheet, is_alone=False, label=b"[rank%d]" % rank) for rank in range(2))
    one.add(b"loading\nName? ")
    two.add(b"loading\n[rank1]: ready\n\r10%\r20%")  # torch's own label is one too many
    assert sheet.text == b"[rank0] loading\n[rank1] loading\n[rank1] ready\n"
    one.tick(later())
    assert sheet.text.endswith(b"ready\n[rank0] Name? ")
    one.add(b"me\nhello\n")
    two.tick(later())
    end = sheet.text.partition(b"Name? me\n")[2].replace(b"[rank1] \r", b"\r")
    assert end == b"[rank0] hello\n\r[rank1] 10%\r[rank1] 20%"
    one.add(b"10%\r100%\n")
    assert sheet.text.endswith(b"\n[rank0] 10%\r[rank0] 100%\n")
