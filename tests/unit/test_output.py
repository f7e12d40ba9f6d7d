"""What ranks print: node logs that can be followed, terminals without noise, bounded memory."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import PATIENCE_S

from launcher import terminal
from launcher.agent.output import stream as output
from launcher.agent.output.noise import without_noise
from launcher.agent.output.stream import NodeLog, RankView, Stream
from launcher.terminal import open_again

NOISE = b"[W1121 20:17:03.842175702 socket.cpp:207] [c10d] The hostname of the client socket cannot"
NOISE += b" be retrieved. err=-3\n"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the agent reads; sums of whole seconds are exact."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


class Screen:
    """A terminal or a pipe that the launcher was started on, and one rank that writes to it."""

    def __init__(self, folder: Path, *, is_tty: bool) -> None:
        self.reader, writer = pty.openpty() if is_tty else os.pipe()
        self.terminal = open_again(writer)
        self.log = NodeLog(None)
        self.log.path = folder / "node_0.log"
        self.log._file = self.log.path.open("ab", buffering=0)
        theirs, self.rank = os.pipe()
        os.set_blocking(theirs, False)
        view = RankView(self.terminal, is_alone=True)
        self.stream = Stream(0, theirs, self.log, view, is_tty, _logged=time.monotonic())

    def write(self, data: bytes) -> None:
        """The rank writes, and the agent takes it."""
        os.write(self.rank, data)
        self.stream.pump()
        self.stream.tick(time.monotonic())

    def logged(self) -> list[str]:
        assert self.log.path is not None
        return self.log.path.read_text().splitlines()

    def end(self) -> None:
        """The rank ends."""
        os.close(self.rank)
        while self.stream.pump():
            pass

    def shown(self) -> bytes:
        self.terminal.drain(PATIENCE_S)
        return os.read(self.reader, 65536)


@pytest.fixture
def tty(tmp_path: Path) -> Screen:
    return Screen(tmp_path, is_tty=True)


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def screen(tmp_path: Path, request: pytest.FixtureRequest) -> Screen:
    return Screen(tmp_path, is_tty=request.param)


def test_the_log_has_the_newest_state_of_a_bar_every_5_s(
    clock: list[float], screen: Screen
) -> None:
    for step in range(100):  # a second each
        screen.write(b"\r\x1b[2Kstep %d/100" % step)
        clock[0] += 1
    assert screen.logged() == [f"[0] step {step}/100" for step in range(5, 100, 5)]
    screen.write(b"\r\x1b[2Kstep 100/100\n")
    assert screen.logged()[-2:] == ["[0] step 95/100", "[0] step 100/100"]


def test_a_bar_that_stands_still_is_logged_as_it_is(clock: list[float], screen: Screen) -> None:
    screen.write(b"\r10%\r11%")
    assert screen.logged() == [] and screen.stream.tick(clock[0])  # there is something to log
    clock[0] += 6
    assert screen.stream.tick(clock[0]) and not screen.stream.tick(clock[0])
    assert screen.logged() == ["[0] 11%"]
    screen.write(b"\n")
    assert screen.logged() == ["[0] 11%"]


def test_a_bar_that_clears_itself_is_logged_as_it_was(screen: Screen) -> None:
    screen.write(b"\r99%\r100%\r    \r\x1b[K\nnext\n")
    assert screen.logged() == ["[0] 100%", "[0] next"]


def test_a_pipe_shows_bytes_as_they_come(tmp_path: Path) -> None:
    screen = Screen(tmp_path, is_tty=False)
    for piece in (b"Name? ", b"\r50%", b"\r\x1b[K[##", b"] 3", b"\r\n\n", b"\xff\0[", b"x"):
        screen.write(piece)
        assert os.read(screen.reader, 65536) == piece


def test_a_traceback_and_the_last_words_are_found(screen: Screen) -> None:
    screen.write(b"one\ntwo\nTraceback (most recent call last):\n  File\nError: no\n[W1121 x\n")
    assert (screen.stream.traceback_line, screen.stream.last_line) == (3, 6)
    assert screen.stream.last_text == "Error: no"
    screen.write(b"\r10%\rFatal Python error: Aborted\nthread\n")
    assert (screen.stream.traceback_line, screen.stream.last_text) == (7, "thread")


def test_a_line_that_a_rank_did_not_end_is_open(screen: Screen) -> None:
    screen.write(b"50%")
    assert screen.terminal.open_by is not None
    screen.write(b"\n")
    assert screen.terminal.open_by is None


@pytest.mark.parametrize("drawn", [b"\r%d%%", b"%d%%\r", b"\r\x1b[K%d%%", b"\x1b[2K\r%d%%"])
def test_however_a_bar_draws_itself(clock: list[float], screen: Screen, drawn: bytes) -> None:
    for percent in (10, 20, 30):
        clock[0] += 6
        screen.write(drawn % percent)
    assert screen.logged()[-1] in ("[0] 30%", "[0] 20%")  # one is complete once the next begins
    screen.write(b"\n")
    assert screen.logged() == ["[0] 10%", "[0] 20%", "[0] 30%"]


def test_a_line_is_not_logged_before_its_end_unless_it_redraws(
    clock: list[float], tty: Screen
) -> None:
    clock[0] += 60
    tty.write(b"Are you ")
    tty.write(b"sure?\n")
    assert tty.logged() == ["[0] Are you sure?"]


def test_a_bar_without_end_takes_no_memory(screen: Screen) -> None:
    screen.stream.view = None  # nobody reads here
    for _ in range(100):
        screen.write(b"\r50%" * 10_000)
    assert len(screen.stream._partial) < 100


def test_a_terminal_that_nobody_reads_costs_a_fixed_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "BACKLOG_BYTES", 1 << 18)
    monkeypatch.setattr(terminal, "MOST_BYTES", 1 << 18)
    screen = Screen(tmp_path, is_tty=False)
    for _ in range(100):
        screen.terminal.queue(b"x" * (1 << 16))
        assert screen.terminal._size < 1 << 19
    os.set_blocking(screen.reader, False)
    is_written = False
    while not is_written:
        is_written = not screen.terminal._size
        with contextlib.suppress(BlockingIOError):
            while os.read(screen.reader, 1 << 16):
                pass
    screen.terminal.queue(b"later")
    shown = screen.shown()
    assert re.fullmatch(rb"\n\.\.\. \d+ lines not shown: the terminal is too slow\nlater", shown)


@pytest.mark.parametrize("is_tty", [True, False])
def test_a_line_without_end_is_cut(tmp_path: Path, is_tty: bool) -> None:
    screen = Screen(tmp_path, is_tty=is_tty)
    screen.stream.view = None  # nobody reads here
    for _ in range(40):
        screen.write(b"x" * 65536)
        assert len(screen.stream._partial) <= output._LONGEST_LINE
    screen.write(b"\n")
    assert "".join(line.removeprefix("[0] ") for line in screen.logged()) == "x" * 40 * 65536


@pytest.mark.parametrize("is_tty", [True, False])
@pytest.mark.parametrize("prefix", [b"", b"[rank0]:"])
def test_torchs_noise_is_in_the_log_alone(tmp_path: Path, is_tty: bool, prefix: bytes) -> None:
    screen = Screen(tmp_path, is_tty=is_tty)
    error = NOISE.replace(b"[W", b"[E")
    other = b"[W1121 20:17:03.8 socket.cpp:99] [c10d] The server cannot listen on any address\n"
    screen.write(b"before\n" + prefix + NOISE + error + prefix + NOISE + other + b"after\n")
    shown = screen.shown().replace(b"\r\n", b"\n")
    assert shown == b"before\n" + error + other + b"after\n"
    assert len(screen.logged()) == 6


def test_noise_that_comes_in_pieces_is_dropped_too(clock: list[float], tmp_path: Path) -> None:
    screen = Screen(tmp_path, is_tty=False)
    for at in range(0, len(NOISE), 10):
        screen.write(NOISE[at : at + 10])
    screen.write(b"[W is a bar")  # like the noise's beginning
    assert screen.terminal.open_by is None
    clock[0] += 1
    screen.stream.tick(clock[0])
    assert screen.shown() == b"[W is a bar"


def test_with_log_level_debug_everything_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOG_LEVEL", "debug")
    screen = Screen(tmp_path, is_tty=False)
    screen.write(NOISE)
    assert screen.shown() == NOISE


@pytest.fixture
def stderr() -> Iterator[tuple[int, int]]:
    """A pipe: the read end, and a descriptor that a process writes its messages to."""
    yield (pipe := os.pipe())
    for fd in pipe:
        os.close(fd)


def test_a_store_that_takes_no_listening_socket_is_no_news(stderr: tuple[int, int]) -> None:
    text = b"[E1126 10:13:50.636693894 TCPStore.cpp:259] [c10d] The libuv TCPStore backend does not"
    text += b" support initialization with an listen fd. Please switch to the legacy TCPStore\n"
    reader, writer = stderr
    with without_noise(writer):
        os.write(writer, text)
    os.write(writer, b"next\n")
    assert os.read(reader, 65536) == b"next\n"


def test_the_agents_own_messages_keep_all_but_the_noise(stderr: tuple[int, int]) -> None:
    reader, writer = stderr
    with pytest.raises(OSError), without_noise(writer):
        os.write(writer, b"a warning\n" + NOISE)
        raise OSError("and an error")
    os.write(writer, b"later\n")
    assert os.read(reader, 65536) == b"a warning\nlater\n"
