"""The helper's calls on ranks that do not agree: an error on every rank, and no wrong value."""

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agents import ROOT, run_agent, run_program
from test_torch_calls import both
from test_torch_helper import own_environment, run_ranks

from distributed import torch as helper
from distributed.collectives import _ROOM, _are_equal

# --- different names, shapes, types and calls ---------------------------------------------------

# The calls of rank 0 and rank 1, and what the error names.
WRONG: dict[str, tuple[tuple[Any, Any], str]] = {
    "other names": (
        (
            lambda: helper.sync_metrics({"loss": 1.0, "mask_loss": 10.0}),
            lambda: helper.sync_metrics({"loss": 3.0, "box_loss": 100.0}),
        ),
        "sync_metrics: mask_loss on rank 0; box_loss on rank 1;",
    ),
    "one more name": (
        (
            lambda: helper.sync_metrics({"loss": 1.0}),
            lambda: helper.sync_metrics({"loss": 3.0, "aux": 50.0}),
        ),
        "sync_metrics: nothing else on rank 0; aux on rank 1;",
    ),
    "many more names": (
        (
            lambda: helper.sync_metrics({"loss": 1.0}),
            lambda: helper.sync_metrics({f"loss {number}": 1.0 for number in range(2 * _ROOM)}),
        ),
        "sync_metrics: loss on rank 0; loss 0, loss 1, ",
    ),
    "other shapes": (
        (
            lambda: helper.mean(torch.ones(2, 3)),
            lambda: helper.mean(torch.ones(3, 2)),
        ),
        "mean: the shape [2, 3] on rank 0; the shape [3, 2] on rank 1;",
    ),
    "other types": (
        (
            lambda: helper.mean(torch.ones(2)),
            lambda: helper.mean(torch.ones(2, dtype=torch.float64)),
        ),
        "mean: the type float32 on rank 0; the type float64 on rank 1;",
    ),
    "other calls": (
        (
            lambda: helper.gather(torch.ones(2)),
            lambda: helper.sync_metrics({"loss": 1.0}),
        ),
        "the ranks call different functions: gather on rank 0; sync_metrics, loss on rank 1;",
    ),
    "waiting and other calls": (
        (
            lambda: helper.barrier(),
            lambda: helper.mean(torch.ones(2)),
        ),
        "the ranks call different functions: barrier on rank 0; mean, the shape [2], the type",
    ),
    "values and bytes": (
        (
            lambda: helper.gather_json(1),
            lambda: helper.gather_bytes(b"1"),
        ),
        "the ranks call different functions: gather_json on rank 0; gather_bytes on rank 1;",
    ),
    "values and rank 0's": (
        (
            lambda: helper.broadcast(1),
            lambda: helper.gather_json(1),
        ),
        "the ranks call different functions: broadcast on rank 0; gather_json on rank 1;",
    ),
}


def _call_wrongly(name: str) -> str:
    try:
        WRONG[name][0][dist.get_rank()]()
    except ValueError as error:
        helper.barrier()  # the ranks can go on together
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_different_calls_are_an_error_on_every_rank(name: str) -> None:
    first, other = both(_call_wrongly, name)
    assert first == other
    assert first.startswith(WRONG[name][1]) and first.endswith("[collective-mismatch]")
    assert "\n" not in first and len(first) < 3000


def _sync_in_the_middle() -> str:
    rank = dist.get_rank()
    return str(_error_of(lambda: helper.sync_metrics({"abc"[rank]: 1.0})))


def _error_of(call: Any) -> object:
    try:
        return call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
def test_all_of_three_ranks_raise() -> None:
    errors = run_ranks(_join_and_sync, ranks=[0, 1, 2], world_size=3)
    assert len({*errors}) == 1
    assert "a on rank 0; b on rank 1; c on rank 2;" in errors[0]


def _join_and_sync() -> str:
    helper.init_distributed(join_timeout_s=30, timeout_s=30)
    return _sync_in_the_middle()


@pytest.mark.parametrize("values", ([5, 5, 5], [0], [2**16 - 1] * 1024))
def test_equal_hashes_are_seen_as_equal(values: list[int]) -> None:
    assert _are_equal(sum(values), sum(one * one for one in values), len(values))


@pytest.mark.parametrize("values", ([1, 2, 3], [0, 2**16 - 1], [7] * 1023 + [8]))
def test_a_hash_that_differs_is_seen_by_every_rank(values: list[int]) -> None:
    assert not _are_equal(sum(values), sum(one * one for one in values), len(values))


def _sync_many() -> dict[str, float]:
    rank = dist.get_rank()
    return helper.sync_metrics({f"{one}": one + rank for one in range(2 * _ROOM)}, weight=rank + 1)


@pytest.mark.slow
def test_more_metrics_than_one_message_holds() -> None:
    means = {f"{one}": pytest.approx(one + 2 / 3) for one in range(2 * _ROOM)}
    assert both(_sync_many) == [means, means]


# --- values that JSON would change --------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "problem"),
    (
        ({0: "cat"}, "the key 0 would become text"),
        ({"a": [{None: 1}]}, "the key None would become text"),
        ([1, (2, 3)], "the tuple (2, 3) would become a list"),
        ({1, 2}, "the value is not JSON (Object of type set is not JSON serializable)"),
    ),
)
def test_a_value_that_json_would_change_is_refused(value: Any, problem: str) -> None:
    cure = "pass text, numbers, lists, dicts"
    for call, name in ((helper.broadcast, "broadcast"), (helper.gather_json, "gather_json")):
        error = _error_of(lambda call=call: call(value))
        assert error == f"TypeError: {name}: on rank 0, {problem}; {cure}"


def _broadcast_wrongly() -> object:
    return _error_of(lambda: helper.broadcast({0: "cat"} if dist.get_rank() == 0 else None))


@pytest.mark.slow
def test_every_rank_refuses_what_rank_0_cannot_send() -> None:
    first, other = both(_broadcast_wrongly)
    assert first == other and "on rank 0, the key 0 would become text" in first


# --- rows and views -----------------------------------------------------------------------------


def _gather_other_samples() -> object:
    return _error_of(lambda: helper.gather(torch.ones(2), samples=3 + dist.get_rank()))


@pytest.mark.slow
def test_ranks_must_gather_the_same_number_of_samples() -> None:
    text = "gather of 3 samples on rank 0; gather of 4 samples on rank 1;"
    assert all(text in error for error in both(_gather_other_samples))


def _exchange_views() -> list[Any]:
    whole = torch.tensor([1 + 2j, 3 - 4j])
    views = [whole.conj(), whole.conj().imag]  # conjugate and negative: no copy yet
    return [
        [helper.gather(one).tolist(), helper.broadcast(one).tolist(), helper.mean(one).tolist()]
        for one in views
    ]


@pytest.mark.slow
def test_conjugate_and_negative_views() -> None:
    numbers, parts = [1 - 2j, 3 + 4j], [-2.0, 4.0]
    expected = [[numbers * 2, numbers, numbers], [parts * 2, parts, parts]]
    assert both(_exchange_views) == [expected, expected]


# --- a rank that has not joined the others ------------------------------------------------------

CALLS = (
    "helper.setup_distributed_models(torch.nn.Linear(1, 1))",
    "helper.get_dataloader_for_distributed([1, 2], 1, shuffle=False)",
    'helper.sync_metrics({"loss": 1.0})',
    "helper.gather(torch.ones(1))",
    "helper.gather_json(1)",
    'helper.gather_bytes(b"1")',
    "helper.broadcast(1)",
    "helper.mean(torch.ones(1))",
    "helper.barrier()",
    "helper.main_first().__enter__()",
    'helper.save("folder", 1, torch.nn.Linear(1, 1), None)',
    'helper.load("folder", torch.nn.Linear(1, 1), None)',
    "helper.Stop()",
)
PROGRAM = """
import torch
from distributed import torch as helper
from distributed.environment import LauncherError

for call in {calls!r}:
    try:
        eval(call)
        print("no error", call)
    except LauncherError as error:
        assert "1 of 2 ranks" in str(error).replace("one", "1") and "\\n" not in str(error)
        assert "call init_distributed() first" in str(error)
print(helper.is_main_process(), helper.seed_everything(1), helper.device().type)
helper.finish()
"""


@pytest.mark.slow
def test_a_rank_that_has_not_joined_is_an_error() -> None:
    ranks = own_environment(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    program = PROGRAM.format(calls=CALLS)
    ended = run_program([sys.executable, "-c", program], ROOT, **ranks, MASTER_PORT="29500")
    assert (ended.stdout.splitlines()[:1], ended.returncode) == (["False None cpu"], 0), ended


def _rank_in_a_child() -> list[int]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_own_rank)


def _own_rank() -> list[int]:
    from distributed.collectives import count_ranks, own_rank

    return [own_rank(), count_ranks()]


@pytest.mark.slow
def test_a_child_of_a_rank_is_alone() -> None:
    assert both(_rank_in_a_child) == [[0, 1], [0, 1]]


FORKED = """
import os, sys
import torch.distributed as dist
from distributed.collectives import barrier, has_group
from distributed.environment import LauncherError

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert has_group()
child = os.fork()
if child == 0:
    try:
        barrier()
    except LauncherError:
        os._exit(7)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
barrier()
dist.destroy_process_group()
barrier()
print("left")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_asked_first", [True, False])
def test_a_child_of_a_rank_that_torch_joined_is_an_error(is_asked_first: bool) -> None:
    program = FORKED if is_asked_first else FORKED.replace("assert has_group()\n", "")
    ended = run_program([sys.executable, "-c", program], ROOT, **own_environment())
    assert ended.stdout.splitlines() == ["7", "left"], ended


AFTER = """
import multiprocessing
from torch_launch_kit.distributed.torch import *

def count():
    try:
        return sync_metrics({"n": 1.0})
    except ValueError as error:
        return str(error)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("child", pool.apply(count))
    init_distributed()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print("forked", pool.apply(count))
    sync_metrics({"n": 1.0})  # torch lets a rank leave while another still connects to it
    cleanup_distributed()
    print("after", count())
    print_main("end", flush=True)
    finish()
"""


@pytest.mark.slow
def test_children_before_and_after_the_ranks_join_and_a_rank_that_has_left(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(AFTER)
    done = run_agent("--nproc-per-node=2", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    forked = "forked sync_metrics: this is a child process of a rank; call it in the rank"
    after = "after this process is one of 2 ranks, but has not joined the others; call init_"
    lines = sorted(done.stdout.splitlines())
    assert [line[:60] for line in lines] == [
        *[after[:60]] * 2,
        *["child {'n': 1.0}"] * 2,
        "end",
        *[forked[:60]] * 2,
    ]
