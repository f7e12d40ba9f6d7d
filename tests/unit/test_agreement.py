"""What ranks must agree on is checked; rows and random numbers belong to the data's order."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agents import run_agent
from test_torch_calls import both
from torch.utils.data import Dataset

from distributed import torch as helper

pytestmark = pytest.mark.slow


def _error_of(function: Any) -> str:
    try:
        return str(function())
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


# --- names and shapes ---------------------------------------------------------------------------


def _disagree() -> list[str]:
    rank = dist.get_rank()
    other = {"loss": 1.0, ("mask_loss", "box_loss")[rank]: 2.0}
    more = {"loss": 1.0} | ({"aux": 1.0} if rank else {})
    many = {f"m{number}": 1.0 for number in range(100 + rank)}
    calls = [
        lambda: helper.sync_metrics(other),
        lambda: helper.sync_metrics(more),
        lambda: helper.sync_metrics(many),
        lambda: helper.mean(torch.ones(2 + rank)),
        lambda: helper.mean(torch.ones(2, dtype=(torch.float32, torch.float64)[rank])),
        lambda: helper.sync_metrics({"loss": rank})["loss"],  # the ranks go on
    ]
    return [_error_of(call) for call in calls]


def test_values_of_other_names_and_shapes_are_an_error_on_every_rank() -> None:
    first, other = both(_disagree)
    metrics, mean = "ValueError: sync_metrics: ranks 0 and 1 differ in ", "ValueError: mean: ranks "
    cure = "; pass the same names and types on every rank"
    assert (
        first
        == other
        == [
            f"{metrics}box_loss, mask_loss{cure}",
            f"{metrics}aux{cure}",
            f"{metrics}m100{cure}",
            f"{mean}0 and 1 differ in shape [2], shape [3]{cure}",
            f"{mean}0 and 1 differ in float32, float64{cure}",
            "0.5",
        ]
    )


def _many_metrics() -> dict[str, float]:
    return helper.sync_metrics({f"m{n}": n + dist.get_rank() for n in range(100)}, weight=2)


def test_more_metrics_than_one_message_holds() -> None:
    assert both(_many_metrics) == [{f"m{n}": n + 0.5 for n in range(100)}] * 2


def _odd_values() -> list[Any]:
    turned = torch.tensor([1 + 2j, 3 - 1j]).conj()
    found = [helper.gather(turned), helper.broadcast(turned), helper.mean(turned)]
    keys = [lambda: helper.broadcast({0: "cat"}), lambda: helper.gather_json([{1: 2}])]
    alone = dist.get_rank() == 0  # a refusal is raised before anything is sent
    return [[one.tolist() for one in found], [_error_of(key) for key in keys] if alone else None]


def test_conjugates_are_sent_and_keys_that_are_not_text_are_refused() -> None:
    (values, errors), (same, _) = both(_odd_values)
    conjugated = [1 - 2j, 3 + 1j]
    assert values == same == [conjugated * 2, conjugated, conjugated]
    told = "TypeError: the key {} would become text; use text, or a list of pairs"
    assert errors == [told.format(0), told.format(1)]


# --- the order of the data ----------------------------------------------------------------------


def _in_order(samples: int, drop_last: bool) -> list[int]:
    loader = helper.get_dataloader_for_distributed(
        range(samples),  # type: ignore[arg-type]
        2,
        shuffle=False,
        drop_last=drop_last,
    )
    parts = [*loader] or [torch.empty(0, dtype=torch.int64)]
    found: list[int] = helper.gather(torch.cat(parts), samples=samples).tolist()
    return found


@pytest.mark.parametrize(
    ("samples", "drop_last", "expected"), [(7, False, 7), (9, True, 8), (1, False, 1)]
)
def test_gather_restores_the_order_of_the_data(
    samples: int, drop_last: bool, expected: int
) -> None:
    assert both(_in_order, samples, drop_last) == [[*range(expected)]] * 2


def _cut_shares() -> list[int]:
    found: list[int] = helper.gather(torch.arange(7)[dist.get_rank() :: 2], samples=7).tolist()
    return found


def test_gather_restores_the_order_of_shares_without_repeats() -> None:
    assert both(_cut_shares) == [[*range(7)]] * 2
    assert helper.gather(torch.arange(3), samples=2).tolist() == [0, 1]


class Epochs(Dataset[int]):
    """Its samples are the epoch, and a random number."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.epoch, int(torch.randint(1 << 30, ()))])

    def __len__(self) -> int:
        return 4


def _epochs(workers: int) -> list[Any]:
    options: dict[str, Any] = {"shuffle": False, "num_workers": workers}
    loader = helper.get_dataloader_for_distributed(Epochs(), 2, **options)
    assert not loader.persistent_workers
    before = torch.random.get_rng_state()
    found = [torch.cat([*loader]).tolist() for _ in range(3)]
    if workers:
        assert torch.equal(torch.random.get_rng_state(), before)
        again = helper.get_dataloader_for_distributed(Epochs(), 2, **options)
        again.sampler.set_epoch(2)  # type: ignore[attr-defined]
        assert torch.cat([*again]).tolist() == found[2]
    return [{epoch for epoch, _ in part} for part in found] + [found[0]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_hears_of_each_epoch_and_its_workers_repeat(workers: int) -> None:
    first, other = both(_epochs, workers)
    assert first[:3] == other[:3] == [{0}, {1}, {2}]
    assert not workers or first[3] != other[3]  # the ranks draw other numbers


def test_the_users_generator_and_worker_function_are_used() -> None:
    def seeds(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        loader = helper.get_dataloader_for_distributed(
            Epochs(), 4, shuffle=False, num_workers=1, generator=generator, worker_init_fn=_fix
        )
        assert loader.generator is generator
        return [loader.generator.get_state().tolist(), torch.cat([*loader]).tolist()]

    assert seeds(1)[1] == seeds(2)[1]  # the function fixes the seed
    assert seeds(1)[0] != seeds(2)[0]


def _fix(number: int) -> None:
    torch.manual_seed(number)


@pytest.mark.parametrize("option", ["sampler", "batch_sampler"])
def test_a_sampler_is_refused_in_one_line(option: str) -> None:
    given: dict[str, Any] = {option: [[0]]}
    with pytest.raises(ValueError, match=rf"^{option}= is not divided among the ranks; give Data"):
        helper.get_dataloader_for_distributed(Epochs(), 2, shuffle=False, **given)


def test_another_world_size_in_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^world_size is 3 but this run's is 1; make them agree"):
        helper.get_dataloader_for_distributed(Epochs(), 2, 3, shuffle=False)


# --- without a process group --------------------------------------------------------------------


CALLS = [
    "setup_distributed_models(torch.nn.Linear(1, 1))",
    "get_dataloader_for_distributed([0], 1, shuffle=False)",
    "sync_metrics({})",
    "gather(torch.ones(1))",
    "mean(torch.ones(1))",
    "broadcast(1)",
    "barrier()",
    "gather_json(1)",
    'save("run", 1, model, optimizer)',
    'load("run", model, optimizer)',
]
ALONE = """
import multiprocessing, subprocess, sys, torch
from torch_launch_kit.distributed.torch import *
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
"""


def test_ranks_that_have_not_joined_are_told_to(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    calls = "".join(f"try:\n    {call}\nexcept ValueError as e:\n    print(e)\n" for call in CALLS)
    joined = "init_distributed()\ncleanup_distributed()\nprint_main(count())\n"
    count = "def count():\n    return sync_metrics({'n': 1})\n"
    child = (
        "with multiprocessing.get_context('spawn').Pool(1) as pool:\n    print(pool.apply(count))"
    )
    text = f"{ALONE}{count}if __name__ == '__main__':\n"
    for part in (child, calls, joined):
        text += "".join(f"    {line}\n" for line in part.splitlines())
    script.write_text(text)
    done = run_agent("--nproc-per-node=2", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = "the launcher started several ranks, and this one has not joined the others; "
    told += (
        "call init_distributed() first; in a program that a rank starts, unset RANK [wrong-world]"
    )
    lines = sorted(done.stdout.splitlines())
    assert lines == sorted(["{'n': 1}"] * 3 + [told] * 2 * len(CALLS))
