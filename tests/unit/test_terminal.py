"""The launcher's own streams: what nodes and ranks print, and a reader that is slow or stuck."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
from agents import PATIENCE_S

from launcher import terminal
from launcher.fanout.ssh import Terminals
from launcher.terminal import BACKLOG_BYTES, Terminal, open_again
from launcher.wire import limits

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
    screen.drain(10)
    screen.let_go()
    os.close(writer)
    slow.join()
    assert b"".join(taken) == LINE * NUMBER


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
        screen.drain(10)
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
    show = terminals.show_behind(b"[0] ")
    show(b"10%", True)
    assert not terminals.is_waiting
    terminals.tick(time.monotonic())
    assert terminals.is_waiting
    terminals.tick(time.monotonic() + 1)
    print("launch: n1 is gone", file=terminals.err.text)
    show(b"\r20%", True)
    show(b"", True)
    terminals.err.drain(5)
    assert capfd.readouterr().err == "[0] 10%\nlaunch: n1 is gone\n[0] \r[0] 20%\n"
