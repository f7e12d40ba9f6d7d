"""Scripts that know nothing of this project: their steps count, and all ranks' places are shown."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from agents import PATIENCE_S, ROOT, Run

from distributed.heartbeat import Heart, find_record
from launcher.agent.diagnosis import stuck
from launcher.agent.diagnosis.stuck import STOPPED, RankState, find_odd, find_straggler
from launcher.agent.node_ranks import Heartbeats, NodeRanks
from launcher.agent.query import Query
from launcher.agent.rank.optimizer_steps import StepCounter
from launcher.typed_json import MessageError
from launcher.wire import messages
from launcher.wire.messages import NodeStacks

LOOPS = str(ROOT / "tests/unit/own_loops.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "where", "last", "step"),
    [
        pytest.param("plain", "data", 30, 30, marks=pytest.mark.another_torch("hang")),
        ("plain", "data", 0, None),  # HANG_SECONDS counts from the start of the ranks
        pytest.param("plain", "validation", 30, 31, marks=pytest.mark.long),
        pytest.param("accumulated", "data", 30, 30, marks=pytest.mark.long),
        pytest.param("two", "data", 30, 60, marks=pytest.mark.long),
    ],
)
def test_the_rank_that_hangs_is_named_with_its_step(
    runs: list[Run], kind: str, where: str, last: int, step: int | None
) -> None:
    limit = "12" if last else "6"
    run = Run(["--nproc-per-node=3", LOOPS, kind, str(last), "1", where], HANG_SECONDS=limit)
    runs.append(run)
    err = run.finish()
    run.assert_gone()
    block = err[err.index("FAILED") :]
    assert block.startswith("FAILED   rank 1 (local rank 1, ") and "[rank-stuck]" in block
    assert (f", at step {step} " if step else ", before its first step; the limit") in block
    assert "no sign of life for " in block and f"; the limit, HANG_SECONDS, is {limit} s" in block
    assert f"in {'read_batch' if where == 'data' else 'validate'}" in block.splitlines()[2]
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


@pytest.mark.parametrize(
    ("ranks", "number", "is_stuck"),
    [
        ([rank(0, 5), rank(1, 5)], 0, False),
        ([rank(0, 5, 61), rank(1, 4, 61)], 1, True),
        ([rank(0, 5, 61), rank(1, 4, 1)], 1, False),  # the one they wait for is alive
        ([rank(0, 4, 61, marks=2), rank(1, 4, 61, marks=1)], 1, True),
        ([rank(0, 4, 61), rank(1, 4, 70)], 1, True),  # the most silent of equals
        ([rank(0, 4, 70), rank(1, 4, 61, is_stopped=True)], 1, True),  # it cannot go on
        ([rank(0, 4, 61), rank(1, 4, 1)], 0, False),  # one of equals still moves
        ([rank(0, -1), rank(1, 9, 61)], 0, False),  # a rank that never beats is not watched
    ],
)
def test_the_straggler_of_a_node(ranks: list[RankState], number: int, is_stuck: bool) -> None:
    found = find_straggler(ranks)
    assert found is not None
    assert (found.rank, found.is_stuck) == (number, is_stuck)


def of_node(*ranks: RankState) -> RankState | None:
    return find_straggler(ranks)


@pytest.mark.parametrize(
    ("nodes", "number"),
    [
        ([of_node(rank(0, 5, 61))], 0),
        ([of_node(rank(0, 5, 1))], None),
        ([of_node(rank(0, 5, 61)), of_node(rank(4, 3, 61))], 4),
        ([of_node(rank(0, 5, 61)), of_node(rank(4, 3, 1))], None),
        ([of_node(rank(0, 3, 61)), of_node(rank(4, 3, 70))], 4),
        ([of_node(rank(0, 3, 61)), of_node(rank(4, 3, 61), rank(5, 3, 1))], None),
        ([of_node(rank(0, 5, 61)), None], None),  # the other node's may be further behind
        ([None, None], None),
        ([], None),
    ],
)
def test_the_rank_that_holds_up_the_run(nodes: list[RankState | None], number: int | None) -> None:
    found = find_straggler(nodes)
    assert (found.rank if found and found.is_stuck else None) == number


REDUCE = ["torch/distributed/distributed_c10d.py:9 in all_reduce", "x.py:4 in step"]
BACKWARD = ["torch/autograd/graph.py:841 in _engine_run_backward", "x.py:3 in step"]
READ, ITEM = ["x.py:7 in read"], ["x.py:9 in item"]


@pytest.mark.parametrize(
    ("nodes", "stacks", "odd"),
    [
        ([of_node(rank(0, 5, 70), rank(1, 5, 61))], [BACKWARD, READ], 1),
        (
            [of_node(rank(0, 5, 70)), of_node(rank(1, 5, 61), rank(2, 5, 61))],
            [REDUCE, REDUCE, READ],
            2,
        ),
        ([of_node(rank(0, 5), rank(1, 5))], [BACKWARD, REDUCE], None),  # both wait
        ([of_node(rank(0, 5), rank(1, 5))], [REDUCE, REDUCE], None),
        ([of_node(rank(0, 5), rank(1, 5), rank(2, 5))], [ITEM, ITEM, READ], 2),
        ([of_node(rank(0, 5), rank(1, 5))], [REDUCE, []], 1),  # it does not answer
        ([of_node(rank(0, 5), rank(1, 5))], [], None),
        ([of_node(rank(0, 5), rank(1, 4))], [ITEM, REDUCE], 1),  # progress comes first
        ([of_node(rank(0, 5)), of_node(rank(1, 4))], [ITEM, READ], 1),
        ([of_node(rank(0, 5, 70), rank(1, 5, is_stopped=True))], [ITEM, [STOPPED]], 1),
    ],
)
def test_the_rank_that_the_others_wait_for(
    nodes: list[RankState | None], stacks: list[list[str]], odd: int | None
) -> None:
    """Of those furthest behind, the one that is not where the others wait."""
    straggler = find_straggler(nodes)
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
