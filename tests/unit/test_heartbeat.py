"""Beats: what a rank writes, and when its silence counts."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distributed import heartbeat
from distributed.heartbeat import Beat, Heart, beat
from launcher.agent.diagnosis import stuck
from launcher.agent.node_ranks import Heartbeats
from launcher.agent.rank.optimizer_steps import StepCounter

NEVER = Beat()


AT_EXIT = """
import faulthandler, sys, threading, time
def work():
    while sys._current_frames()[main].f_code.co_name != "_shutdown":
        time.sleep(0.01)
    faulthandler.dump_traceback(all_threads=True)
main = threading.main_thread().ident
threading.Thread(target=work).start()
"""


@pytest.fixture
def beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heartbeats]:
    """The agent's records of two ranks, of which this process is the second."""
    records = Heartbeats(2)
    by_hand = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    by_hand |= {"HEARTBEAT_FILE": records.name(1), "MASTER_ADDR": "x"}
    by_hand |= {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "rank_1.json")}
    for name, value in by_hand.items():
        monkeypatch.setenv(name, value)
    heartbeat._heart.cache_clear()
    yield records
    heartbeat._heart.cache_clear()


def test_a_beat_writes_this_ranks_record_alone(beats: Heartbeats) -> None:
    assert beats.read(1) == NEVER and beats.silence_s(1) == 0
    before = time.monotonic()
    beat(3)
    assert beats.read(0) == NEVER
    record = beats.read(1)
    assert (record.step, record.saved) == (3, -1)
    assert before <= record.time <= time.monotonic()
    beat(4, saved=2)
    beat(5)
    assert (beats.read(1).step, beats.read(1).saved) == (5, 2)
    assert beats.reached() == (2, 5)
    beats.clear()
    assert beats.read(1) == NEVER
    assert beats.reached() == (2, 5)


def test_progress_counts_the_beats_of_a_step(beats: Heartbeats) -> None:
    seen = []
    for step in (1, 1, 2, None, 2, 3):
        beat(step)
        seen.append(beats.read(1).progress)
    assert seen == [(1, 0), (1, 1), (2, 0), (2, 0), (2, 1), (3, 0)]


def test_the_limit_comes_from_the_longest_silence(
    beats: Heartbeats, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limits = []
    for step, seconds in ((7, 1), (8, 1), (9, 2), (10, 9), (11, 1)):
        now += seconds
        beat(step)
        limits.append(beats.read(1).limit_s)
    assert limits == [600, 600, 60, 90, 90]


def test_the_limit_is_the_scripts_own_else_the_variable(
    beats: Heartbeats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANG_SECONDS", "20")
    limits = []
    for given in (None, 5, None):
        beat(1, hang_seconds=given)
        limits.append((beats.read(1).limit_by, beats.read(1).limit_s))
    assert limits == [(1, 20), (2, 5), (2, 5)]


def test_steps_are_counted_until_the_script_tells_its_own(
    beats: Heartbeats, tmp_path: Path
) -> None:
    """One that only saves tells none: else it would be behind the others for ever."""
    place = heartbeat.find_record(beats.name(1))
    assert place is not None
    count = StepCounter(Heart(*place, tmp_path / "x.stack", is_counted=True))
    optimizer = torch.optim.SGD([torch.ones(1)], lr=1)
    seen = []
    for told in ({}, {"saved": 1}, {}, {"step": 7}, {}):
        beat(**told) if told else count(optimizer)
        record = beats.read(1)
        seen.append((record.step, record.saved, record.is_counted))
    assert seen == [(1, -1, True), (1, 1, True), (2, 1, True), (7, 1, False), (7, 1, False)]


@pytest.mark.parametrize("beats_itself", [False, True])
@pytest.mark.parametrize("hang_seconds", ["", "20"])
def test_the_silence_before_the_first_step_counts_from_the_start(
    beats: Heartbeats,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hang_seconds: str,
    beats_itself: bool,
) -> None:
    """A slow start may be healthy: without a limit of the user's it is told, and ends nothing."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setenv("HANG_SECONDS", hang_seconds)
    place = heartbeat.find_record(beats.name(1))
    assert place is not None
    Heart(*place, tmp_path / "x.stack", is_counted=True)
    if beats_itself:
        beat()
    record = beats.read(1)
    assert (record.step, record.time) == (-1, 100)
    assert (record.limit_s, record.ends_run) == (float(hang_seconds or 600), bool(hang_seconds))
    assert not beats.are_counted()
    assert beats.silence_s(0) == 0  # a program whose steps nobody counts is not watched


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.usefixtures("beats")
def test_a_beat_costs_under_10_microseconds() -> None:
    fastest = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for step in range(1000):
            beat(step)
        fastest = min(fastest, time.perf_counter() - start)
    assert fastest < 10e-3


def test_without_an_agent_a_beat_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEARTBEAT_FILE", raising=False)
    heartbeat._heart.cache_clear()
    beat(1)
    heartbeat._heart.cache_clear()


def test_a_stack_of_python_alone_is_shown_with_what_another_thread_does(tmp_path: Path) -> None:
    """Python waits at its exit for the threads of the script."""
    script, stack = tmp_path / "script.py", tmp_path / "rank_0.stack"
    script.write_text(AT_EXIT)
    with stack.open("w") as file:
        subprocess.run([sys.executable, script], stderr=file)
    wait, *more = stuck.read_stack(stack)
    assert re.fullmatch(r"threading\.py:\d+ in \w+", wait)
    assert more[-1] == f"another thread: {script}:6 in work"


def test_ranks_with_the_same_stack_share_a_line() -> None:
    by_rank = {0: ["a.py:1 in f", "a.py:9 in g"], 1: [], 2: ["a.py:1 in f", "a.py:9 in g"]}
    assert stuck.group_stacks(by_rank) == [
        "ranks 0, 2: a.py:1 in f < a.py:9 in g",
        "rank 1: no Python stack",
    ]


def test_a_subprocess_of_a_rank_cannot_write_to_the_record(
    beats: Heartbeats, tmp_path: Path
) -> None:
    """It has the variable, and another file behind that descriptor."""
    beat(3)
    fd = int(beats.name(1).partition(":")[0])
    data = tmp_path / "data"
    data.write_bytes(b"x" * 1000)
    code = "from distributed.heartbeat import beat; beat(99)"
    with data.open("r+b") as file:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", code],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, file.fileno(), fd)],
        )
    assert os.waitpid(pid, 0)[1] == 0
    assert data.read_bytes() == b"x" * 1000
    assert beats.read(1).step == 3


def test_a_record_that_is_being_written_is_never_read_as_silence(tmp_path: Path) -> None:
    beats = Heartbeats(1)
    fd = int(beats.name(1).partition(":")[0])
    writer = os.fork()
    if writer == 0:
        heart = Heart(fd, 0, tmp_path / "stack")
        for step in itertools.count():
            heart.beat(step, None, 60.0)
    try:
        read = [beats.read(0) for _ in range(100_000)]
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    begun = [beat for beat in read if beat != Beat()]
    assert begun and all(beat.limit_s == 60.0 and beat.time > 0 for beat in begun)
