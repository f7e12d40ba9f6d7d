"""The output of ranks: node logs that can be followed, and terminals without noise."""

import errno
import fcntl
import os
import pty
import resource
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from agents import PATIENCE_S, ROOT, eventually, execute, rarely, with_limits

from launcher import terminal
from launcher.agent.facts import Facts
from launcher.agent.node_ranks import Heartbeats, NodeRanks, Rank
from launcher.agent.output import stream as output
from launcher.agent.output.noise import without_noise
from launcher.agent.output.outputs import Outputs
from launcher.agent.output.stream import NodeLog, RankView, Stream
from launcher.agent.output.tracebacks import HeldTraceback
from launcher.agent.torchrun_arguments import parse
from launcher.descriptors import wait_for_input
from launcher.failure import Failure
from launcher.fanout.terminals import Terminals
from launcher.record.run_folder import RunFolder
from launcher.screen import LONGEST_HELD, View
from launcher.terminal import BACKLOG_BYTES, Terminal, open_again
from launcher.text import short_host_name
from launcher.wire import limits

NOISE = b"[W1121 20:17:03.842175702 socket.cpp:207] [c10d] The hostname of the client socket cannot"
NOISE += b" be retrieved. err=-3\n"


class Screen:
    """A terminal or pipe on which the launcher was started, and one rank that writes to it."""

    def __init__(self, folder: Path, *, is_tty: bool = False, is_debug: bool = False) -> None:
        self.reader, writer = pty.openpty() if is_tty else os.pipe()
        os.set_blocking(self.reader, False)
        self.terminal = open_again(writer)
        (folder / "node_0.log").touch()
        self.log = NodeLog(folder / "node_0.log")
        theirs, self.rank = os.pipe()
        os.set_blocking(theirs, False)
        view = RankView(self.terminal, is_alone=True, label=b"", is_debug=is_debug)
        self.stream = Stream(0, theirs, self.log, view, is_tty, _logged=time.monotonic())

    def write(self, data: bytes) -> None:
        """Have the rank write data, and the agent read it."""
        os.write(self.rank, data)
        self.stream.pump()
        self.stream.show_held(time.monotonic())

    def logged(self) -> list[str]:
        assert self.log.path is not None
        return self.log.path.read_text().splitlines()

    def shown(self) -> bytes:
        """Return what is new on the terminal."""
        self.terminal.drain(PATIENCE_S)
        try:
            return os.read(self.reader, 65536)
        except BlockingIOError:
            return b""


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
    assert screen.logged() == [] and screen.stream.show_held(clock[0])  # there is output to log
    clock[0] += 6
    assert screen.stream.show_held(clock[0]) and not screen.stream.show_held(clock[0])
    assert screen.logged() == ["[0] 11%"] and screen.terminal.open_by is not None
    screen.write(b"\n")
    assert screen.logged() == ["[0] 11%"] and screen.terminal.open_by is None


def test_a_bar_that_clears_itself_is_logged_as_it_was(screen: Screen) -> None:
    screen.write(b"\r99%\r100%\r    \r\x1b[K\nnext\n")
    assert screen.logged() == ["[0] 100%", "[0] next"]


def test_a_pipe_shows_bytes_as_they_come(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    for piece in (b"Name? ", b"\r50%", b"\r\x1b[K[##", b"] 3", b"\r\n\n", b"\xff\0[", b"x"):
        screen.write(piece)
        assert screen.shown() == piece


def test_a_traceback_and_the_last_words_are_found(screen: Screen) -> None:
    screen.write(b"one\ntwo\nTraceback (most recent call last):\n  File\nError: no\n[W1121 x\n")
    assert (screen.stream.traceback_line, screen.stream.last_line) == (3, 6)
    assert screen.stream.last_text == "Error: no"
    screen.write(b"\r10%\rFatal Python error: Aborted\nthread\n")
    assert (screen.stream.traceback_line, screen.stream.last_text) == (7, "thread")


@pytest.mark.parametrize("drawn", [b"\r%d%%", b"%d%%\r", b"\r\x1b[K%d%%", b"\x1b[2K\r%d%%"])
def test_however_a_bar_draws_itself(clock: list[float], screen: Screen, drawn: bytes) -> None:
    for percent in (10, 20, 30):
        clock[0] += 6
        screen.write(drawn % percent)
    assert screen.logged()[-1] in ("[0] 30%", "[0] 20%")  # a bar is complete once the next begins
    screen.write(b"\n")
    assert screen.logged() == ["[0] 10%", "[0] 20%", "[0] 30%"]


def test_a_line_is_not_logged_before_its_end_unless_it_redraws(
    clock: list[float], tty: Screen
) -> None:
    clock[0] += 60
    tty.write(b"Are you ")
    tty.write(b"sure?\n")
    assert tty.logged() == ["[0] Are you sure?"]


def test_a_line_without_end_is_cut(screen: Screen) -> None:
    screen.stream.view = None  # no terminal shows this stream
    for _ in range(40):
        screen.write(b"x" * 65536)
        assert len(screen.stream._partial) <= output._LONGEST_LINE
    screen.write(b"\n")
    assert "".join(line.removeprefix("[0] ") for line in screen.logged()) == "x" * 40 * 65536


@pytest.mark.parametrize("prefix", [b"", b"[rank0]:"])
def test_torchs_noise_is_in_the_log_alone(screen: Screen, prefix: bytes) -> None:
    error = NOISE.replace(b"[W", b"[E")
    other = b"[W1121 20:17:03.8 socket.cpp:99] [c10d] The server cannot listen on any address\n"
    screen.write(b"before\n" + prefix + NOISE + error + prefix + NOISE + other + b"after\n")
    shown = screen.shown().replace(b"\r\n", b"\n")
    assert shown == b"before\n" + error + other + b"after\n"
    assert len(screen.logged()) == 6


def test_noise_that_comes_in_pieces_is_dropped_too(clock: list[float], tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    for at in range(0, len(NOISE), 10):
        screen.write(NOISE[at : at + 10])
    screen.write(b"[W is a bar")  # starts like the noise
    assert screen.terminal.open_by is None
    clock[0] += 1
    screen.stream.show_held(clock[0])
    assert screen.shown() == b"[W is a bar"


def test_with_log_level_debug_everything_is_shown(tmp_path: Path) -> None:
    assert parse(["x.py"], {"LOG_LEVEL": "debug"})[0].is_debug
    screen = Screen(tmp_path, is_debug=True)
    screen.write(NOISE)
    assert screen.shown() == NOISE


NO_NEWS = b"[E1126 10:13:50.636693894 TCPStore.cpp:259] [c10d] The libuv TCPStore backend does not"
NO_NEWS += b" support initialization with an listen fd. Please switch to the legacy TCPStore\n"


@pytest.mark.parametrize("noise", [NOISE, NO_NEWS])
def test_the_agents_own_messages_keep_all_but_the_noise(noise: bytes) -> None:
    reader, writer = os.pipe()
    with pytest.raises(OSError), without_noise(writer, is_debug=False):
        os.write(writer, b"a warning\n" + noise)
        raise OSError("and an error")
    os.write(writer, b"later\n")
    assert os.read(reader, 65536) == b"a warning\nlater\n"


def test_output_that_a_full_disk_loses_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    screen = Terminal(full)
    for _ in range(3):
        screen.show(b"step\n", None)
        screen.drain(PATIENCE_S)
    os.close(full)
    err = capfd.readouterr().err
    assert err.count("No space left on device") == 1 and err.endswith("[log-lost]\n")


def test_the_launchers_own_text_may_name_files_in_any_encoding(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "shown", os.O_WRONLY | os.O_CREAT)
    screen = Terminal(fd)
    print("resume   cd '/data/\udcff'", file=screen.text)
    screen.drain(PATIENCE_S)
    os.close(fd)
    assert (tmp_path / "shown").read_bytes() == b"resume   cd '/data/\\udcff'\n"


def test_the_agents_own_text_may_hold_any_character(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "shown", os.O_WRONLY | os.O_CREAT)
    outputs = Outputs.__new__(Outputs)
    screen = Terminal(fd)
    errors = screen.text.errors
    screen.text.reconfigure(encoding="ascii", errors=errors)  # type: ignore[attr-defined]
    outputs._terminals = screen, screen
    outputs.say("error in '/data/\ud800' of J\xfcrgen")
    screen.drain(PATIENCE_S)
    os.close(fd)
    assert (tmp_path / "shown").read_bytes() == (
        b"node agent: error in '/data/\\ud800' of J\\xfcrgen\n"
    )


def test_a_terminal_that_gets_no_thread_writes_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "shown"
    fd = os.open(file, os.O_WRONLY | os.O_CREAT)
    screen = Terminal(fd)
    monkeypatch.setattr(screen._writer, "start", Mock(side_effect=RuntimeError("no thread")))
    screen.show(b"one\n", None)
    screen.show(b"two\n", None)
    screen.drain(0.0)
    os.close(fd)
    assert file.read_bytes() == b"one\ntwo\n"


# --- several streams ------------------------------------------------------------------------------


class Sheet(Terminal):
    """A screen that keeps everything written to it."""

    def __init__(self) -> None:
        self.shown = b""

    def queue(self, data: bytes) -> None:
        self.shown += data


def two_on_a_sheet(*, has_prefix: bool = False) -> tuple[Sheet, View, View]:
    """Return a screen, and views of two streams that share it."""
    sheet, prefixes = Sheet(), (b"[0] ", b"[1] ") if has_prefix else (b"", b"")
    one, two = (View(sheet, is_alone=False, prefix=prefix) for prefix in prefixes)
    return sheet, one, two


def later() -> float:
    return time.monotonic() + limits.PARTIAL_S + 0.001


def test_lines_written_in_pieces_stay_whole() -> None:
    sheet, one, two = two_on_a_sheet()
    for piece in (b"loss", b" ", b"0.5", b"\n"):
        one.add(piece)
        two.add(piece)
    assert sheet.shown == b"loss 0.5\nloss 0.5\n"


def test_a_prompt_is_shown_after_a_short_time_and_then_as_it_grows() -> None:
    sheet, one, _ = two_on_a_sheet()
    one.add(b"Name")
    assert one.show_held(time.monotonic()) and sheet.shown == b""
    assert not one.show_held(later()) and sheet.shown == b"Name"
    one.add(b"? ")
    assert sheet.shown == b"Name? "


def test_a_line_of_another_begins_a_line() -> None:
    sheet, one, two = two_on_a_sheet()
    one.add(b"10%")
    one.show_held(later())
    two.add(b"warned\n")
    one.add(b"\r20%")
    one.show_held(later())
    assert sheet.shown == b"10%\nwarned\n\r20%"


def test_a_second_bar_waits_for_the_first() -> None:
    sheet, one, two = two_on_a_sheet()
    one.add(b"\r10%")
    one.show_held(later())
    for _ in range(3 * LONGEST_HELD // 1000):
        two.add(b"\r50%" * 250)
    assert two.show_held(later()) and sheet.shown == b"\r10%"
    assert len(two._held) <= 2 * LONGEST_HELD
    one.add(b"\n")
    two.show_held(later())
    assert sheet.shown.startswith(b"\r10%\n\r50%")


def test_a_long_line_is_shown_in_pieces() -> None:
    sheet, one, two = two_on_a_sheet()
    one.add(b"x" * (LONGEST_HELD + 1))
    two.add(b"y" * (LONGEST_HELD + 1))
    assert sheet.shown == b"x" * (LONGEST_HELD + 1) + b"\n" + b"y" * (LONGEST_HELD + 1)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_each_line_and_each_state_of_a_bar_has_its_prefix(size: int) -> None:
    sheet, one, two = two_on_a_sheet(has_prefix=True)
    text = b"a\n\nb\r\n\rbar 1\rbar 2\r\nc"
    for at in range(0, len(text), size):
        one.add(text[at : at + size])
        one.show_held(later())
    two.add(b"d\n")
    one.add(b"e\n")
    shown = sheet.shown.replace(b"\r[0] \n", b"\r\n").replace(b"[0] \r", b"\r")
    expected = b"[0] a\n[0] \n[0] b\r\n\r[0] bar 1\r[0] bar 2\r\n[0] c\n[1] d\n[0] e\n"
    assert shown == expected


@pytest.mark.parametrize("clear", [b"\r\x1b[2K", b"\r\x1b[K", b"\x1b[2K\r", b"\r\x1b[0K\x1b[1K"])
def test_a_bar_that_clears_its_line_keeps_its_prefix(clear: bytes) -> None:
    sheet, one, two = two_on_a_sheet(has_prefix=True)
    for state in (b"10%", b"20%"):
        one.add(clear + state)
        one.show_held(later())
    assert sheet.shown == b"[0] " + clear + b"[0] 10%" + clear + b"[0] 20%"
    two.add(b"x\n")
    one.add(clear + b"done\n")
    assert sheet.shown.endswith(b"20%\n[1] x\n[0] " + clear + b"[0] done\n")


def test_lines_of_ranks_with_labels_stay_apart() -> None:
    sheet = Sheet()
    one, two = (
        RankView(sheet, is_alone=False, label=b"[rank%d] " % rank, is_debug=False)
        for rank in range(2)
    )
    one.add(b"loading\nName? ")
    two.add(b"loading\n[rank1]: ready\n\r10%\r20%")  # torch's own label is dropped
    assert sheet.shown == b"[rank0] loading\n[rank1] loading\n[rank1] ready\n"
    one.show_held(later())
    assert sheet.shown.endswith(b"ready\n[rank0] Name? ")
    one.add(b"me\nhello\n")
    two.show_held(later())
    end = sheet.shown.partition(b"Name? me\n")[2].replace(b"[rank1] \r", b"\r")
    assert end == b"[rank0] hello\n\r[rank1] 10%\r[rank1] 20%"
    one.add(b"10%\r100%\n")
    assert sheet.shown.endswith(b"\n[rank0] 10%\r[rank0] 100%\n")


def test_the_label_is_torchruns_template_if_one_is_given() -> None:
    options = ["--tee=3", "--role=worker", "x.py"]
    name = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
    template = "[${role_name}${rank}/${local_rank}${other}]: "
    assert parse(options, {})[0].label_of(5, 1) == b"[rank5] "
    assert parse(options, {name: template})[0].label_of(5, 1) == b"[worker5/1${other}]: "
    assert parse(["x.py"], {name: template})[0].label_of(5, 1) == b""
    sheet = Sheet()
    view = RankView(sheet, is_alone=False, label=b"[rank0]: ", is_debug=False)
    view.add(b"creating\n[rank0]: Traceback\n")
    assert sheet.shown == b"[rank0]: creating\n[rank0]: Traceback\n"


# --- the launcher's own streams -------------------------------------------------------------------


LINE = b"x" * 999 + b"\n"
NUMBER = 4 * BACKLOG_BYTES // len(LINE)
by_launcher_and_agent = pytest.mark.parametrize("opened", [Terminal, open_again])


@by_launcher_and_agent
def test_a_slow_reader_gets_every_line(opened: Callable[[int], Terminal]) -> None:
    reader, writer = os.pipe()
    taken: list[bytes] = []

    def read() -> None:
        while data := os.read(reader, 65536):
            taken.append(data)
            time.sleep(0.002)

    slow = threading.Thread(target=read)
    slow.start()
    screen = opened(writer)
    for _ in range(NUMBER):
        screen.show(LINE, None)
    screen.drain(PATIENCE_S)
    screen.let_go()
    os.close(writer)
    slow.join()
    assert b"".join(taken) == LINE * NUMBER


def test_a_slow_reader_of_a_descriptor_above_1023_gets_all() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    reader, writer = os.pipe()
    fd = fcntl.fcntl(writer, fcntl.F_DUPFD, 1500)
    os.close(writer)
    os.set_blocking(fd, False)
    screen = Terminal(fd)
    screen.write(LINE * 100)  # more than a pipe holds
    room = select.poll()
    room.register(fd, select.POLLOUT)
    eventually(lambda: not room.poll(0), "the pipe to be full")
    taken = b""
    while len(taken) < len(LINE * 100) and wait_for_input([reader], PATIENCE_S):
        taken += os.read(reader, 65536)
    assert taken == LINE * 100
    screen.drain(PATIENCE_S)
    os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@by_launcher_and_agent
def test_a_stuck_reader_is_told_what_it_missed(
    monkeypatch: pytest.MonkeyPatch, opened: Callable[[int], Terminal]
) -> None:
    monkeypatch.setattr(limits, "TERMINAL_STUCK_S", 0.0)
    monkeypatch.setattr(terminal, "MOST_BYTES", BACKLOG_BYTES)
    reader, writer = os.pipe()
    screen = opened(writer)
    began = time.monotonic()
    for _ in range(NUMBER):
        screen.show(LINE, None)
    assert time.monotonic() - began < PATIENCE_S

    def end() -> None:
        screen.drain(PATIENCE_S)
        screen.let_go()
        os.close(writer)

    ending = threading.Thread(target=end)
    ending.start()
    with open(reader, "rb") as shown:
        lines = shown.readlines()
    ending.join()
    dropped = [
        int(line.split()[1]) for line in lines if line.endswith(b"the terminal is too slow\n")
    ]
    assert dropped and lines.count(LINE) == len(lines) - len(dropped) == NUMBER - sum(dropped)


def test_output_is_written_before_what_follows_where_the_reader_takes_it() -> None:
    reader, writer = os.pipe()
    screen = open_again(writer)
    screen.show(b"50%", screen)
    screen.write(b"node agent: restart\n")
    os.write(writer, b"another's\n")
    assert os.read(reader, 99) == b"50%\nnode agent: restart\nanother's\n"
    assert os.get_blocking(writer)


def test_the_launchers_own_text_begins_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    terminals = Terminals()
    show = terminals.make_show(b"[0] ")
    show(b"10%", True)
    assert not terminals.is_waiting
    terminals.show_held(time.monotonic())
    assert terminals.is_waiting
    terminals.show_held(time.monotonic() + 1)
    print("launch: n1 is gone", file=terminals.err.text)
    show(b"\r20%", True)
    show(b"", True)
    terminals.err.drain(5)
    assert capfd.readouterr().err == "[0] 10%\nlaunch: n1 is gone\n[0] \r[0] 20%\n"


# --- a traceback that only follows from another rank's failure ------------------------------------


TRACEBACK = b"Traceback (most recent call last):\n  File x, line 1\nValueError: y\n"


@pytest.mark.parametrize(
    ("before", "start"),
    [
        (b"loss 0.5\n", b""),
        (b"loss 0.5\n", b"[rank0]: "),
        (b"\r 50%|     | 5/10 [00:01<00:01, 5.0it/s]", b""),  # a bar, without a newline
        (b"[rank0]: x\n", b"[rank0]:   + Exception Group "),
        (b"", "╭──────── ".encode()),
        (b"ERROR:", b" "),
    ],
)
def test_all_from_its_first_line_on_is_held(before: bytes, start: bytes) -> None:
    held = HeldTraceback()
    assert held.hold_back(before + start + TRACEBACK) == before
    assert held.hold_back(b"more\n") == b""
    assert held.release() == start + TRACEBACK + b"more\n"
    assert held.hold_back(b"later\n") == b"later\n"


def test_what_is_held_is_bounded() -> None:
    held, shown = HeldTraceback(), 0
    for _ in range(100):
        shown += len(held.hold_back(TRACEBACK * 1000))
        assert len(held.text) < 1 << 19
    assert shown > 90 * 1000 * len(TRACEBACK) - (1 << 19)


class OneRank(Screen):
    """One rank that writes to a pipe, and its log."""

    def show(self, data: bytes) -> bytes:
        """Have the rank write data; returns what the terminal shows of it."""
        self.write(data)
        return self.shown()

    def end(self, *, is_consequence: bool) -> bytes:
        os.close(self.rank)
        self.stream.end(is_consequence=is_consequence)
        return self.shown()


@pytest.mark.parametrize("follows", [True, False])
def test_the_terminal_lacks_what_only_follows_and_the_log_has_it(
    tmp_path: Path, follows: bool
) -> None:
    rank = OneRank(tmp_path)
    assert rank.show(b"loss\n" + TRACEBACK) == b"loss\n"
    assert rank.show(b"bye") == b""
    assert rank.end(is_consequence=follows) == (b"" if follows else TRACEBACK + b"bye")
    said = ["loss", *TRACEBACK.decode().splitlines(), "bye"]
    assert rank.logged() == [f"[0] {line}" for line in said]


def test_a_failure_names_no_line_of_a_log_that_lacks_it(tmp_path: Path) -> None:
    one = OneRank(tmp_path)
    ranks = NodeRanks([], Heartbeats(1), 0, "host")
    failed = Rank(0, 0, os.getpid(), (one.stream, one.stream), tmp_path / "rank_0.json", code=1)
    one.show(TRACEBACK)
    assert ranks.describe_end(failed).log.endswith("/node_0.log:1")
    os.dup2(os.open("/dev/full", os.O_WRONLY), one.log._file.fileno())
    one.show(TRACEBACK)
    assert ranks.describe_end(failed).log.endswith("/node_0.log")


def test_a_file_system_that_is_full_only_when_a_log_is_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path, "mine", 0, {})
    folder.create()
    outputs = Outputs(parse(["x.py"], {})[0])
    outputs.keep_in(folder)
    outputs.log._file = Mock(close=Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    outputs.log.close()
    outputs.log.close()
    assert capsys.readouterr().err == (
        f"node agent: warning: {short_host_name()}: {folder.node_log} is incomplete from here "
        "(No space left); the run continues [log-lost]\n"
    )


def test_without_a_log_the_terminal_shows_all(tmp_path: Path) -> None:
    rank = OneRank(tmp_path)
    os.dup2(os.open("/dev/full", os.O_WRONLY), rank.log._file.fileno())
    rank.show(TRACEBACK)
    assert rank.end(is_consequence=True) == TRACEBACK
    assert not NodeLog(None).is_kept


def test_a_traceback_that_was_shown_does_not_keep_a_later_one_from_being_held(
    tmp_path: Path,
) -> None:
    rank = OneRank(tmp_path)
    rank.show(TRACEBACK)
    later = time.monotonic() + limits.TRACEBACK_S
    assert rank.stream.show_held(later, 2 * limits.TRACEBACK_S) and rank.shown() == b""
    assert not rank.stream.show_held(later, limits.TRACEBACK_S)
    assert rank.shown() == TRACEBACK
    assert rank.show(b"on\n" + TRACEBACK) == b"on\n"
    assert rank.end(is_consequence=True) == b""


def test_how_long_a_traceback_is_held_while_nothing_has_failed(tmp_path: Path) -> None:
    one, stdout = OneRank(tmp_path), OneRank(tmp_path).stream
    error_file = tmp_path / "rank_0.json"
    forked = Rank(0, 0, os.getpid(), (stdout, one.stream), error_file)
    ranks = NodeRanks([forked], Heartbeats(1), 0, "host")
    before = time.monotonic()
    one.show(TRACEBACK)
    now = time.monotonic()
    assert ranks.show_held(before, is_ending=False)
    ranks.show_held(now + 100, is_ending=True)
    error_file.touch()  # the rank is about to exit
    ranks.show_held(before + limits.RAISED_S - 0.1, is_ending=False)
    assert one.shown() == b""
    ranks.show_held(now + limits.RAISED_S, is_ending=False)
    assert one.shown() == TRACEBACK
    error_file.unlink()
    one.show(TRACEBACK)
    ranks.show_held(time.monotonic() + limits.TRACEBACK_S, is_ending=False)
    assert one.shown() == TRACEBACK


def failed(rank: int, *, follows: bool) -> Failure:
    return Failure("x", "y", 1, "host", 0, 1.0, rank=rank, is_consequence=follows)


def test_what_only_follows() -> None:
    first = failed(1, follows=False)
    facts = Facts(codes={0: 1, 1: 1, 2: 1, 3: 143, 4: 0}, stopped={3})
    facts.failures += [first, failed(0, follows=True), failed(2, follows=False)]
    assert [rank for rank in range(5) if facts.is_consequence(first, rank)] == [0, 3]
    assert not any(facts.is_consequence(None, rank) for rank in range(5))


PROGRAM = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == int(sys.argv[1]):
    raise ValueError("batch 7 holds no samples")
dist.barrier()
"""


def launch(folder: Path, who: str, **environment: str) -> tuple[str, str]:
    """Run two ranks, one of which fails; returns stderr and the node's log."""
    (folder / "program.py").write_text(PROGRAM)
    command = [ROOT / "scripts/launch.sh", "--nproc-per-node=2", "program.py", who]
    done = execute(folder, *command, code=1, **environment)
    (log,) = folder.glob("logs/2*/node_0.log")
    return done.stderr, log.read_text()


@pytest.mark.slow
@pytest.mark.another_torch("failure block")
@pytest.mark.parametrize("fresh", ["1", *rarely("0")])  # 1: without an error file
def test_the_traceback_of_rank_0_that_lost_rank_1_is_in_the_log_alone(
    tmp_path: Path, fresh: str
) -> None:
    longer = with_limits(tmp_path / "limits", TRACEBACK_S=PATIENCE_S, SETTLE_S=PATIENCE_S)
    err, log = launch(tmp_path, "1", FRESH=fresh, **longer)
    assert "Traceback" not in err and "Connection closed by peer" not in err
    assert "FAILED   rank 1 " in err and "ValueError: batch 7 holds no samples\n" in err
    assert "others   1 rank " in err  # it lost its peer, or was stopped
    assert "[0] [rank0]: Traceback" in log and "[1] [rank1]: Traceback" in log


@pytest.mark.slow
def test_the_traceback_of_rank_0_that_failed_first_stands_above_the_block(tmp_path: Path) -> None:
    err, _ = launch(tmp_path, "0")
    above = err.partition("FAILED   rank 0 ")[0]
    assert above.endswith("[rank0]: ValueError: batch 7 holds no samples\n")
