"""A launcher's own streams: what several nodes print, and a reader that is slow or stuck."""

from __future__ import annotations

import os
import threading
import time

import pytest
from agents import PATIENCE_S

from launcher.fanout.terminal import BACKLOG_BYTES, Terminal, Terminals
from launcher.wire import limits

LINE = b"x" * 999 + b"\n"
NUMBER = 4 * BACKLOG_BYTES // len(LINE)


def test_a_slow_reader_gets_every_line() -> None:
    reader, writer = os.pipe()
    taken: list[bytes] = []

    def read() -> None:
        while data := os.read(reader, 65536):
            taken.append(data)
            time.sleep(0.002)

    slow = threading.Thread(target=read)
    slow.start()
    screen = Terminal(writer)
    for _ in range(NUMBER):
        screen.show(LINE, None)
    screen.drain(10)
    os.close(writer)
    slow.join()
    assert b"".join(taken) == LINE * NUMBER


def test_a_stuck_reader_is_told_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TERMINAL_STUCK_S", 0.0)
    reader, writer = os.pipe()
    screen = Terminal(writer)
    began = time.monotonic()
    for _ in range(NUMBER):
        screen.show(LINE, None)
    assert time.monotonic() - began < PATIENCE_S

    def end() -> None:
        screen.drain(10)
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
