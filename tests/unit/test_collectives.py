"""Collectives that do not match are named: from given calls, and from real ranks that wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from agents import Run

from launcher.agent.diagnosis import collectives
from launcher.agent.diagnosis.collectives import Calls, Collective, find_mismatches
from launcher.typed_json import encode


def call(
    number: int, is_done: bool = True, operation: str = "all_reduce", size: int = 8
) -> Collective:
    return Collective("default_pg", number, operation, f"[{size}] Float", is_done)


DONE = [call(1), call(2)]


IN_3 = [*DONE, call(3, False)]
IN_PAIR = [*DONE, Collective("group 3", 5, "broadcast", "[1] Long", False)]
CALL = "all_reduce of [8] Float"


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ([DONE, DONE], ""),
        ([IN_3, IN_3], ""),  # just now
        ([IN_3, DONE, IN_3], f"ranks 0, 2 in #3 {CALL}; rank 1 last called #2 {CALL}"),
        ([[call(1, False)], []], f"rank 0 in #1 {CALL}; rank 1 called none"),
        (
            [IN_3, [*DONE, call(3, False, "broadcast")]],
            f"the ranks differ: rank 0 #3 {CALL}; rank 1 #3 broadcast of [8] Float",
        ),
        (
            [[call(7, False)], [call(7, False, size=9)]],
            f"the ranks differ: rank 0 #7 {CALL}; rank 1 #7 all_reduce of [9] Float",
        ),
        ([[call(7, False, "all_gather")], [call(7, False, "all_gather", 9)]], ""),
        ([IN_PAIR, IN_PAIR, DONE], ""),  # a group is compared among its own ranks
    ],
)
def test_what_does_not_match(told: list[list[Collective]], line: str) -> None:
    found = find_mismatches({rank: Calls(calls) for rank, calls in enumerate(told)})
    assert found == ([f"default_pg: {line}"] if line else [])


def test_the_newest_of_each_group_are_told(tmp_path: Path) -> None:
    calls = collectives.newest(call(number) for number in range(1, 100))
    assert [one.number for one in calls.calls] == [*range(80, 100)]
    file = tmp_path / "rank_3.collectives"
    file.write_text(encode(calls))
    assert collectives.read({3: file, 4: tmp_path / "none"}, 0.05) == {3: calls}


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(30):
    dist.all_reduce(torch.ones(4))
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
parameter.grad = torch.ones(1)
optimizer.step()
print(f"ready {rank}", flush=True)
dist.broadcast(torch.ones(4), 0) if rank == 1 else dist.all_reduce(torch.ones(6))
dist.barrier()
"""


@pytest.mark.slow
def test_a_hang_is_ended_with_the_collectives_that_differ(runs: list[Run], tmp_path: Path) -> None:
    script = tmp_path / "differs.py"
    script.write_text(SCRIPT)
    options = ["--nproc-per-node=3", str(script)]
    runs.append(Run(options, TORCH_FR_BUFFER_SIZE="200", HANG_SECONDS="12"))
    err = runs[0].finish()
    runs[0].assert_gone()
    assert "[rank-stuck]" in err
    wanted = (
        "stacks   default_pg: the ranks differ: ranks 0, 2 #31 all_reduce of [6] Float; "
        "rank 1 #31 broadcast of [4] Float\n"
    )
    assert wanted in err
