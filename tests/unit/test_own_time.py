"""A process that was suspended blames no other process: its own silence does not count."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from agents import LOOPS, Run, world
from ports import free_port
from test_node_link import connect
from test_restarts import Beating

from launcher import own_time, processes
from launcher.own_time import Deadline, OwnTime
from launcher.wire import launcher_link, limits
from launcher.wire.meeting import Wait

Clock = list[float]
SHORT = {"HANG_SECONDS": "8", "SILENCE_SECONDS": "10"}


@pytest.fixture
def own(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> OwnTime:
    """The code that measures silence reads this clock."""
    own = OwnTime()
    monkeypatch.setattr(own_time, "now", own.now)
    monkeypatch.setattr(own_time, "since", own.since)
    return own


@pytest.mark.parametrize(
    ("turns", "silence_s", "passed_s"),
    [  # seconds between readings -> seconds of silence, and seconds that count for deadlines
        ([2, 2, 2, 2, 2, 2], 12, 12),
        ([2, 2, limits.STILL_S], 9, 9),  # a slow iteration
        ([2, 25], 0, 2 + limits.STILL_S),  # suspended: the others were not silent
        ([2, 25, 2, 2], 4, 6 + limits.STILL_S),  # silence after that counts
        ([2, 25, 2, 25, 2], 2, 6 + 2 * limits.STILL_S),  # time slices of a scheduler
        ([3600, 2, 2, 2, 2, 2, 2], 12, 12 + limits.STILL_S),  # but the others really are gone
    ],
)
def test_a_silence_counts_from_the_end_of_ones_own(
    clock: Clock, own: OwnTime, turns: Sequence[float], silence_s: float, passed_s: float
) -> None:
    heard, began = clock[0], own.now()
    for seconds in turns:
        clock[0] += seconds
        own.now()
    assert own.since(heard) == silence_s
    assert own.now() - began == passed_s


def pass_by(clock: Clock, seconds: float) -> None:
    """Let time pass in small steps, as in a running loop."""
    for _ in range(int(seconds / limits.BEAT_S)):
        clock[0] += limits.BEAT_S
        own_time.now()


@pytest.mark.usefixtures("own")
def test_every_measure_of_silence_forgives_once(clock: Clock, tmp_path: Path) -> None:
    """The link to another agent, a rank's beats, the check-in and the time for ranks to save."""
    peer, theirs = connect()
    beats, wait, kill = Beating(tmp_path).reach(1), Wait(300.0), Deadline()
    kill.set_within(30.0)
    clock[0] += 3600
    assert not peer.is_silent and beats.read(0).silence_s == 0
    assert wait.left_s == 295 and not kill.expire()
    pass_by(clock, limits.SILENCE_S + limits.BEAT_S)
    assert peer.is_silent and beats.read(0).silence_s == limits.SILENCE_S + limits.BEAT_S
    pass_by(clock, 30)
    assert kill.expire()
    peer.close()
    theirs.close()


@pytest.mark.parametrize(
    ("turns", "is_heard"),
    [
        ([2, 2, 2], True),
        ([2, 25, 2], True),  # stopped with the launcher, which beats again
        ([2, 2, 2, 2, 2, 2, 2], False),
        ([2, 25, 2, 2, 2, 2, 2, 2], False),
    ],
)
@pytest.mark.usefixtures("own")
def test_a_control_stream_outlives_a_suspension(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, turns: list[float], is_heard: bool
) -> None:
    left = [*turns]

    def wait(reads: list[int], _seconds: float) -> list[int]:
        clock[0] += left.pop(0)
        return [] if left or not is_heard else reads

    monkeypatch.setattr(launcher_link, "wait_for_input", wait)
    assert launcher_link.await_input(0, 10.0) is is_heard


@pytest.mark.long
def test_two_nodes_that_are_suspended_continue(runs: list[Run]) -> None:
    port = free_port()
    for node in (0, 1):  # a loop without an end
        runs.append(Run([*world(port, node), LOOPS, "plain", "-1", "0"], **SHORT))
    runs[0].wait_for("started")
    pids = [run.process.pid for run in runs]
    pids += [pid for first in pids for pid in processes.descendants(first)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(13)  # longer than each limit, on purpose
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    time.sleep(2 * limits.BEAT_S)  # all have checked one another again
    runs[0].process.terminate()
    for run in runs:
        err = run.finish()
        assert run.process.returncode == 143 and "FAILED" not in err, err
