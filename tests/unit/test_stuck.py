"""Which rank is stuck, as tables of what the agents see of their ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launcher.agent.diagnosis import stuck
from launcher.agent.diagnosis.stuck import STOPPED, RankState, find_odd, find_straggler


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
