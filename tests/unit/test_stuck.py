"""Which rank is stuck, as tables of what the agents see of their ranks."""

from __future__ import annotations

import pytest

from launcher.agent.stuck import RankState, Straggler, find_straggler, find_stuck


def rank(
    number: int, step: int, silence_s: float = 0.0, *, marks: int = 0, is_stopped: bool = False
) -> RankState:
    return RankState(number, (step, marks), silence_s, 60.0, is_stopped)


def straggler(number: int, step: int, *, is_stuck: bool = True, silence_s: float = 61) -> Straggler:
    return Straggler(number, (step, 0), is_stuck, False, silence_s)


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
def test_a_nodes_straggler(ranks: list[RankState], number: int, is_stuck: bool) -> None:
    found = find_straggler(ranks)
    assert found is not None
    assert (found.rank, found.is_stuck) == (number, is_stuck)


def test_a_node_without_ranks_has_no_straggler() -> None:
    assert find_straggler([]) is None


@pytest.mark.parametrize(
    ("stragglers", "stuck"),
    [
        ([straggler(0, 5)], 0),
        ([straggler(0, 5, is_stuck=False)], None),
        ([straggler(0, 5), straggler(4, 3)], 4),
        ([straggler(0, 5), straggler(4, 3, is_stuck=False)], None),
        ([straggler(0, 3), straggler(4, 3, silence_s=70)], 4),
        ([straggler(0, 3), straggler(4, 3, is_stuck=False)], None),
        ([straggler(0, 5), None], None),  # the other node's may be further behind
        ([None, None], None),
        ([], None),
    ],
)
def test_the_rank_that_holds_up_the_run(
    stragglers: list[Straggler | None], stuck: int | None
) -> None:
    assert find_stuck(stragglers) == stuck
