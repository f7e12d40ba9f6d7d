"""Scripts that know nothing of this project: their steps count, and all ranks' places are shown."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from agents import LOOPS, PATIENCE_S, ROOT, Run

from distributed.heartbeat import Heart, find_record
from launcher.agent.diagnosis import stuck
from launcher.agent.diagnosis.stuck import STOPPED, RankState, find_odd, find_straggler
from launcher.agent.node_ranks import Heartbeats, NodeRanks
from launcher.agent.query import Query
from launcher.agent.rank.optimizer_steps import StepCounter
from launcher.typed_json import MessageError
from launcher.wire import messages
from launcher.wire.messages import NodeStacks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "told", "limit"),
    [
        pytest.param(30, ", at step 30 ", 12, marks=pytest.mark.another_torch("hang")),
        (0, ", before its first step; the limit", 6),  # which counts from the start of the ranks
    ],
)
def test_the_rank_that_hangs_is_named_with_its_step(
    runs: list[Run], last: int, told: str, limit: int
) -> None:
    """Scripts of other shapes are left to `make prove PART=hangs`."""
    run = Run(["--nproc-per-node=3", LOOPS, "plain", str(last), "1"], HANG_SECONDS=str(limit))
    runs.append(run)
    err = run.finish()
    run.assert_gone()
    block = err[err.index("FAILED") :]
    assert block.startswith("FAILED   rank 1 (local rank 1, ") and "[rank-stuck]" in block
    assert told in block
    assert "no sign of life for " in block and f"; the limit, HANG_SECONDS, is {limit} s" in block
    assert "in read_batch" in block.splitlines()[2]
    assert run.process.returncode == 137


@pytest.mark.slow
def test_a_silence_is_told_once_and_ends_nothing() -> None:
    """With a limit shortened to 2 s in the agent."""
    short = "from distributed import heartbeat as h, limits\n"
    short += "limits.FIRST_SILENCE_S = 2.0; h.LIMIT_OF_LONGEST = 0\n"
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{short}"
    start += "from launcher.agent.supervisor import main\nsys.exit(main())"
    command = [sys.executable, "-c", start, "--nproc-per-node=2", LOOPS, "plain", "5", "1"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert run.stderr is not None
    told = ""
    while "read_batch" not in told:
        line = run.stderr.readline()
        assert line, told
        told += line
    time.sleep(5)
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    _, rest = run.communicate(timeout=PATIENCE_S)
    text = told + rest
    assert text.count("no step for ") == 1
    assert ", after step 5: rank 1 is behind; kill -QUIT " in text


def test_what_another_node_tells_is_shown_harmlessly() -> None:
    with pytest.raises(MessageError):
        messages.read('{"NodeStacks":{"ranks":[{"rank":"x","frames":["a.py:1 in f"]}]}}')
    told = messages.read('{"NodeStacks":{"ranks":[{"rank":7,"frames":["\\u001b[2Ja.py:1 in f"]}]}}')
    shown: list[str] = []
    ranks = NodeRanks([], Heartbeats(1), 0, "here")
    query = Query(ranks, ["here", "there"], {1: None}, shown.append, None)  # type: ignore[dict-item]
    query._told[0] = NodeStacks([])
    query.receive(1, told)
    assert query.on_time() is None
    assert shown[0].splitlines()[1] == "  rank 7: \\x1b[2Ja.py:1 in f"


def test_steps_are_counted_until_the_script_beats(tmp_path: Path) -> None:
    beats = Heartbeats(1)
    place = find_record(beats.name(0))
    assert place is not None
    counter = StepCounter(Heart(*place, tmp_path / "a.stack", is_counted=True))
    model = torch.nn.Linear(1, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    assert beats.read(0).progress == (-1, 0) and not beats.are_counted()
    seen = []
    for optimizer in (first, second, second, first):
        counter(optimizer, (), {})
        seen.append(beats.read(0).progress)
    assert seen == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert beats.are_counted()
    own = Heart(*place, tmp_path / "b.stack")
    own.beat(7, None, None)
    counter(first, (), {})
    assert (beats.read(0).step, beats.are_counted()) == (7, False)
    own.beat(8, None, None)
    counter(first, (), {})
    assert beats.read(0).step == 8


# --- which rank is stuck --------------------------------------------------------------------------


def rank(
    number: int, step: int, silence_s: float = 0.0, *, marks: int = 0, is_stopped: bool = False
) -> RankState:
    return RankState(number, (step, marks), silence_s > 60, is_stopped, silence_s)


def straggler_of(*nodes: list[RankState] | None) -> RankState | None:
    return find_straggler([None if ranks is None else find_straggler(ranks) for ranks in nodes])


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [  # the ranks of each node; the rank, and whether it is stuck
        ([[rank(0, 5), rank(1, 5)]], (0, False)),
        ([[rank(0, 5, 61), rank(1, 4, 61)]], (1, True)),
        ([[rank(0, 5, 61), rank(1, 4, 1)]], (1, False)),  # the one they wait for is alive
        ([[rank(0, 4, 61, marks=2), rank(1, 4, 61, marks=1)]], (1, True)),
        ([[rank(0, 4, 61), rank(1, 4, 70)]], (1, True)),  # the most silent of equals
        ([[rank(0, 4, 70), rank(1, 4, 61, is_stopped=True)]], (1, True)),  # it cannot go on
        ([[rank(0, 4, 61), rank(1, 4, 1)]], (0, False)),  # one of equals still moves
        ([[rank(0, -1), rank(1, 9, 61)]], (0, False)),  # a rank that never beats is not watched
        ([[rank(0, 5, 61)], [rank(4, 3, 61)]], (4, True)),
        ([[rank(0, 3, 61)], [rank(4, 3, 61), rank(5, 3, 1)]], (0, False)),
        ([[rank(0, 5, 61)], None], None),  # the other node's may be further behind
        ([], None),
    ],
)
def test_the_rank_that_holds_up_the_run(
    nodes: list[list[RankState] | None], expected: tuple[int, bool] | None
) -> None:
    found = straggler_of(*nodes)
    assert (found and (found.rank, found.is_stuck)) == expected


REDUCE = ["torch/distributed/distributed_c10d.py:9 in all_reduce", "x.py:4 in step"]
BACKWARD = ["torch/autograd/graph.py:841 in _engine_run_backward", "x.py:3 in step"]
READ, ITEM = ["x.py:7 in read"], ["x.py:9 in item"]


@pytest.mark.parametrize(
    ("nodes", "stacks", "odd"),
    [
        ([[rank(0, 5, 70), rank(1, 5, 61)]], [BACKWARD, READ], 1),
        ([[rank(0, 5, 70)], [rank(1, 5, 61), rank(2, 5, 61)]], [REDUCE, REDUCE, READ], 2),
        ([[rank(0, 5), rank(1, 5)]], [BACKWARD, REDUCE], None),  # both wait
        ([[rank(0, 5), rank(1, 5)]], [REDUCE, REDUCE], None),
        ([[rank(0, 5), rank(1, 5), rank(2, 5)]], [ITEM, ITEM, READ], 2),
        ([[rank(0, 5), rank(1, 5)]], [REDUCE, []], 1),  # it does not answer
        ([[rank(0, 5), rank(1, 5)]], [], None),
        ([[rank(0, 5), rank(1, 4)]], [ITEM, REDUCE], 1),  # progress comes first
        ([[rank(0, 5)], [rank(1, 4)]], [ITEM, READ], 1),
        ([[rank(0, 5, 70), rank(1, 5, is_stopped=True)]], [ITEM, [STOPPED]], 1),
    ],
)
def test_the_rank_that_the_others_wait_for(
    nodes: list[list[RankState]], stacks: list[list[str]], odd: int | None
) -> None:
    """Of those furthest behind, the one that is not where the others wait."""
    straggler = straggler_of(*nodes)
    assert straggler is not None
    assert find_odd(straggler, dict(enumerate(stacks))) == odd


def test_a_stack_is_read_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written in two parts, as on a busy machine."""
    file = tmp_path / "rank.stack"
    file.write_text("Thread 0x1\n")

    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            with file.open("a") as stack:
                stack.write("Thread 0x2\n")

    monkeypatch.setattr(time, "sleep", sleep)
    stuck.wait_for_stacks({file: 0}, 5)
    assert file.read_text() == "Thread 0x1\nThread 0x2\n"
    assert len(looks) >= 8
