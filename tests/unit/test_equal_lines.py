"""Lines of several ranks on one terminal: equal ones once, and none lost, late or out of order."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import time
from pathlib import Path

import pytest
from agents import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent.output.equal_lines import MOST_BYTES, WAIT_S, EqualLines, Writer
from launcher.agent.output.stream import NodeLog, RankView, open_stream
from launcher.agent.output.terminal import Terminal
from launcher.screen import PARTIAL_S, Screen

ROOT = Path(__file__).resolve().parents[2]


class Sheet(Screen):
    """A screen that keeps what it is given."""

    def __init__(self) -> None:
        self.text = b""

    def queue(self, data: bytes) -> None:
        self.text += data

    @property
    def lines(self) -> list[str]:
        return self.text.decode().splitlines()


class Ranks:
    """Ranks whose output is shown on one sheet, and a clock."""

    def __init__(self, number: int) -> None:
        self.sheet = Sheet()
        self.equal = EqualLines(self.sheet)
        self.writers = [self.equal.join(rank) for rank in range(number)]
        self.now = 1000.0

    def write(self, rank: int, *lines: str) -> None:
        self.equal.add(self.writers[rank], "".join(f"{one}\n" for one in lines).encode(), self.now)

    def wait(self, seconds: float = WAIT_S) -> bool:
        self.now += seconds
        return self.equal.tick(self.now)


def ranks_of(label: str) -> list[int]:
    runs = [[int(end) for end in run.split("-")] for run in label.split(",")]
    return [rank for run in runs for rank in range(run[0], run[-1] + 1)]


def lines_by_rank(shown: list[str], number: int) -> list[list[str]]:
    """Return what each rank wrote, as the terminal tells it."""
    found: list[list[str]] = [[] for _ in range(number)]
    for line in shown:
        label, text = line.removeprefix("[rank").split("] ", 1)
        for rank in ranks_of(label):
            found[rank].append(text)
    return found


def test_a_line_that_all_ranks_write_is_shown_once_and_at_once() -> None:
    ranks = Ranks(8)
    for rank in (3, 0, 1, 2, 7, 5, 4):
        ranks.write(rank, "a warning")
    assert ranks.sheet.lines == []
    ranks.write(6, "a warning")
    assert ranks.sheet.lines == ["[rank0-7] a warning"]


def test_a_line_waits_a_short_time_for_other_ranks() -> None:
    ranks = Ranks(7)
    for rank in (5, 0, 2, 1):
        ranks.write(rank, "a warning")
    assert ranks.wait(WAIT_S - 0.01) and ranks.sheet.lines == []
    assert not ranks.wait(0.02) and ranks.sheet.lines == ["[rank0-2,5] a warning"]
    ranks.write(3, "a warning")
    assert not ranks.wait()
    assert ranks.sheet.lines[1:] == ["[rank3] a warning"]


def test_lines_that_differ_are_shown_in_the_order_in_which_they_came() -> None:
    ranks = Ranks(2)
    for step in range(3):
        for rank in (1, 0):
            ranks.write(rank, f"step {step} of {rank}")
            ranks.now += 0.001
    ranks.wait()
    assert ranks.sheet.lines == [
        f"[rank{rank}] step {step} of {rank}" for step in range(3) for rank in (1, 0)
    ]


def test_equal_lines_after_lines_that_differ_are_found() -> None:
    ranks = Ranks(3)
    for rank in (1, 0, 2):
        ranks.write(rank, f"device {rank}", "====", "model", "====")
        ranks.now += 0.001
    assert ranks.sheet.lines == [
        *("[rank1] device 1", "[rank0] device 0", "[rank2] device 2"),
        *("[rank0-2] ====", "[rank0-2] model", "[rank0-2] ===="),
    ]


def test_lines_that_ranks_write_in_another_order_are_shown_in_each_ones_order() -> None:
    ranks = Ranks(2)
    ranks.write(0, "a", "b")
    ranks.write(1, "b", "a")
    ranks.wait()
    assert lines_by_rank(ranks.sheet.lines, 2) == [["a", "b"], ["b", "a"]]
    assert len(ranks.sheet.lines) == 3


def test_torchs_own_label_of_the_rank_does_not_make_lines_differ() -> None:
    ranks = Ranks(2)
    for rank in range(2):
        ranks.write(rank, f"[rank{rank}]: KeyError: 'pixels'", f"other [rank{rank}]: x")
    ranks.wait()
    shown = ["[rank0-1] KeyError: 'pixels'", "[rank0] other [rank0]: x", "[rank1] other [rank1]: x"]
    assert ranks.sheet.lines == shown


LINES = st.lists(st.text("ab \x1b", max_size=1), min_size=1, max_size=3)


@given(st.lists(st.tuples(st.integers(0, 2), LINES, st.floats(0, 0.3))))
def test_any_lines_are_all_shown_and_each_ranks_in_order(
    written: list[tuple[int, list[str], float]],
) -> None:
    ranks = Ranks(3)
    expected: list[list[str]] = [[] for _ in range(3)]
    for rank, lines, seconds in written:
        ranks.write(rank, *lines)
        expected[rank] += lines
        ranks.wait(seconds)
    assert not ranks.wait()
    shown = ranks.sheet.text.decode().split("\n")[:-1]
    assert lines_by_rank(shown, 3) == expected


def views(sheet: Sheet) -> list[RankView]:
    equal = EqualLines(sheet)
    return [RankView(sheet, is_alone=False, rank=rank, equal=equal) for rank in range(2)]


def later() -> float:
    return time.monotonic() + max(WAIT_S, PARTIAL_S) + 0.001


def test_a_bar_and_a_prompt_come_after_the_lines_before_them() -> None:
    sheet = Sheet()
    one, two = views(sheet)
    one.add(b"loading\nName? ")
    two.add(b"loading\nready\n\r10%\r20%")
    assert sheet.lines == ["[rank0-1] loading"]
    one.tick(later())
    assert sheet.text == b"[rank0-1] loading\n[rank1] ready\n[rank0] Name? "
    one.add(b"me\nhello\n")
    two.tick(later())
    end = b"Name? me\n[rank0] hello\n[rank1] \r[rank1] 10%\r[rank1] 20%"
    assert sheet.text.replace(b"[rank1] \r", b"\r").endswith(end.replace(b"[rank1] \r", b"\r"))


def test_a_bar_that_has_ended_has_its_label_in_each_state() -> None:
    sheet = Sheet()
    one, _ = views(sheet)
    one.add(b"10%\r100%\n")
    assert sheet.text == b"[rank0] 10%\r[rank0] 100%\n"


def test_lines_that_wait_are_shown_at_the_end() -> None:
    reader, writer = os.pipe()
    terminal = Terminal(writer)
    terminal.attach(selectors.DefaultSelector())
    log = NodeLog(None)
    streams = [open_stream(rank, log, terminal, is_alone=False, has_label=True) for rank in (0, 1)]
    for (fd, stream), text in zip(streams, (b"bye\nfrom 0\n", b"bye\n"), strict=True):
        os.write(fd, text)
        os.close(fd)
        stream.end()
    terminal.detach(1.0)
    assert os.read(reader, 4096) == b"[rank0-1] bye\n[rank0] from 0\n"


def test_a_rank_that_writes_much_is_shown_as_it_comes() -> None:
    sheet = Sheet()
    one, two = views(sheet)
    one.add(b"first\n")
    block = b"x" * 99 + b"\n"
    for _ in range(10):
        one.add(block * 500)
    assert sheet.text.count(b"\n") > 5001 - MOST_BYTES // 100
    assert sheet.text.startswith(b"[rank0] first\n[rank0] xxx")
    two.add(b"a warning\n")
    assert two.tick(time.monotonic())  # rank 1 is compared as before
    two.tick(later())
    assert sheet.text.count(b"\n") == 5002 and sheet.text.endswith(b"[rank1] a warning\n")


def test_a_rank_is_compared_again_when_it_writes_less() -> None:
    writer = Writer(0)
    assert not writer.is_flood(MOST_BYTES, 1000.0)
    assert all(writer.is_flood(1 << 20, 1000.0 + 0.01 * each) for each in range(1000))
    assert not writer.is_flood(100, 1012.0)


SCRIPT = """
import os, sys, time
rank = int(os.environ["RANK"])
for number in range(20):
    print("UserWarning: this line is the same on all ranks", file=sys.stderr)
    print(f"step {number} of rank {rank}")
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_the_terminal_shows_equal_lines_once_and_the_log_each_ranks(tmp_path: Path) -> None:
    (tmp_path / "warn.py").write_text(SCRIPT)
    command = [str(ROOT / "scripts/launch.sh"), "--nproc-per-node=4", "--show", "all", "warn.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "UserWarning" in line]
    steps = [[f"step {number} of rank {rank}" for number in range(20)] for rank in range(4)]
    texts = ["UserWarning: this line is the same on all ranks"] * 20
    assert lines_by_rank(warned, 4) == [texts] * 4
    assert len(warned) < 60  # 20 where the ranks are in step
    assert lines_by_rank(done.stdout.splitlines(), 4) == steps
    (log,) = tmp_path.glob("logs/2*/node_0.log")
    for rank in range(4):
        mine = re.findall(rf"^\[{rank}\] (.*)$", log.read_text(), re.MULTILINE)
        assert [line for line in mine if "UserWarning" not in line] == steps[rank]
        assert len(mine) == 40
