"""A notice reaches the ranks that handle it, at once or later, and harms no other rank.

Ranks that may save when another rank has failed are told apart in the same way.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distributed.heartbeat import STACK_SIGNAL
from launcher import own_time
from launcher.agent.facts import Facts
from launcher.agent.node_ranks import NodeRanks
from launcher.agent.notice import UNHANDLED, Notice
from launcher.agent.savers import Savers
from launcher.processes import handles
from launcher.wire import limits

HANDLES = "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))"
WAITS = "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])"
SAVES = f"""
import faulthandler, signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)
faulthandler.register({STACK_SIGNAL:d}, open(sys.argv[1], "w"))
print("ready", flush=True)
sys.stdin.readline()
signal.pthread_sigmask(signal.SIG_BLOCK, [{STACK_SIGNAL:d}])  # as if it had no CPU to write
print("saving", flush=True)
sys.stdin.readline()
"""
SCRIPTS = {  # what a rank does before it reports, and after a line from the test
    "none": ("pass", "pass"),
    "handler": (HANDLES, "import time; time.sleep(600)"),
    "sigwait": (WAITS, "signal.sigwait([signal.SIGUSR1]); os._exit(75)"),
    "late": ("pass", f"{HANDLES}; print(flush=True); import time; time.sleep(600)"),
}


def ranks_of(living: list[SimpleNamespace], node_rank: int = 0) -> NodeRanks:
    return cast(NodeRanks, SimpleNamespace(living=lambda: living, node_rank=node_rank))


class Group:
    """Processes that stand in for ranks, by the names of their scripts."""

    def __init__(self) -> None:
        self.all = {name: start(*script) for name, script in SCRIPTS.items()}
        self.facts = Facts()
        ranks = cast(NodeRanks, SimpleNamespace(living=self.living, node_rank=0))
        self.notice = Notice(ranks, self.facts, pytest.fail)  # it must print nothing
        self.notice.accept(signal.SIGUSR1)

    def living(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(rank=rank, pid=process.pid)
            for rank, process in enumerate(self.all.values())
            if process.poll() is None
        ]

    def look(self) -> set[str]:
        """Pass the notice to live processes if it is due; returns those that got it."""
        self.notice.deliver()
        return {name for rank, name in enumerate(self.all) if rank in dict(self.facts.noticed)}

    def go_on(self, name: str) -> None:
        stdin = self.all[name].stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.close()


def start(before: str, after: str, **options: Any) -> subprocess.Popen[str]:
    code = f"{before}; print(flush=True); input(); {after}"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **{"start_new_session": True, **options},
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    for process in made.all.values():
        process.kill()
        process.wait()


def test_a_notice_reaches_who_handles_it_and_nobody_dies_of_it(group: Group) -> None:
    assert group.look() == {"handler", "sigwait"}
    group.go_on("sigwait")
    assert [group.all[name].wait() for name in ("handler", "sigwait")] == [75, 75]
    group.go_on("late")
    late = group.all["late"].stdout
    assert late is not None
    late.readline()
    assert group.look() == {"handler", "sigwait", "late"}
    assert group.all["late"].wait() == 75
    group.go_on("none")
    assert group.all["none"].wait() == 0  # the signal did not kill it


def test_a_rank_that_was_just_reaped_gets_none_and_the_others_do(group: Group) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    living = group.living()
    group.notice.ranks = ranks_of([SimpleNamespace(rank=9, pid=gone.pid), *living])
    assert group.look() == {"handler", "sigwait"}


def test_a_rank_that_has_the_handlers_of_its_agent_is_left_alone() -> None:
    process = start(HANDLES, "pass", start_new_session=False)
    facts = Facts()
    notice = Notice(ranks_of([SimpleNamespace(rank=0, pid=process.pid)]), facts, print)
    assert notice.accept(signal.SIGUSR1)
    notice.deliver()
    process.communicate("\n")
    assert (process.returncode, facts.noticed) == (0, set())
    assert not handles(process.pid, signal.SIGUSR1)  # it has exited


@pytest.mark.parametrize(
    ("signals", "noticed", "node_rank", "is_said"),
    [
        ([signal.SIGUSR1], set(), 0, True),
        ([signal.SIGUSR2], set(), 0, True),
        ([signal.SIGUSR1], {(1, 0.0)}, 0, False),
        ([signal.SIGUSR1], set(), 1, False),  # node rank 0 reports it
        ([], set(), 0, False),
    ],
)
def test_that_nobody_handles_it_is_said_once_and_not_at_once(
    signals: list[int],
    noticed: set[tuple[int, float]],
    node_rank: int,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, said = [1000.0], list[str]()
    monkeypatch.setattr(own_time, "now", lambda: clock[0])
    told = Notice(ranks_of([], node_rank), Facts(noticed=noticed), said.append)
    assert all(map(told.accept, signals))
    told.deliver()
    assert said == []
    for _ in range(3):
        clock[0] += limits.NOTICE_WARN_S
        told.deliver()
    assert said == [UNHANDLED.format(signal.Signals(one).name) for one in signals] * is_said


COUNTS = """
import os, signal
def count(signum, _):
    os.write(1, f"{signal.Signals(signum).name}\\n".encode())
for one in signal.SIGUSR1, signal.SIGUSR2:
    signal.signal(one, count)
"""


def test_a_notice_reaches_a_rank_each_time_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(own_time, "now", lambda: clock[0])
    process = start(f"exec({COUNTS!r})", "pass")
    notice = Notice(ranks_of([SimpleNamespace(rank=0, pid=process.pid)]), Facts(), print)
    stdout = process.stdout
    assert stdout is not None

    def comes(signum: int, seconds: float) -> bool:
        clock[0] += seconds
        is_new = notice.accept(signum)
        notice.deliver()
        return is_new

    assert comes(signal.SIGUSR1, 0.0)
    assert stdout.readline() == "SIGUSR1\n"
    assert not comes(signal.SIGUSR1, limits.NOTICE_SAME_S - 1), "by another way"
    assert comes(signal.SIGUSR2, 0.0)
    assert stdout.readline() == "SIGUSR2\n"
    assert comes(signal.SIGUSR1, 2.0)
    assert stdout.readline() == "SIGUSR1\n"
    out, _ = process.communicate("\n")
    assert (process.returncode, out) == (0, ""), "nothing was sent twice"


def test_a_rank_that_has_no_cpu_to_write_its_stack_may_be_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks = tmp_path / "stacks"
    command = [sys.executable, "-c", SAVES, str(stacks)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        rank = SimpleNamespace(rank=0, pid=process.pid, code=None, stack_file=stacks)
        savers = Savers(ranks_of([rank]), 30.0, print)
        monkeypatch.setattr(limits, "SAVERS_LOOK_S", 60.0)  # for the first look: it must succeed
        assert savers.record_handlers()
        assert stacks.stat().st_size > 0

        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"saving\n"
        monkeypatch.setattr(limits, "SAVERS_LOOK_S", 0.1)
        assert [each.rank for each in savers.grant_grace()] == [0]
