"""The helper's loader: epochs, random numbers and the order of the data."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_torch_calls import both
from torch.utils.data import Dataset, Subset

from distributed import torch as helper

pytestmark = pytest.mark.slow


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
    assert helper.gather(torch.arange(3), samples=3).tolist() == [0, 1, 2]


def _gather_two_epochs() -> str:
    with pytest.raises(ValueError, match="gather") as caught:
        helper.gather(torch.arange(4 + dist.get_rank()), samples=7)
    return str(caught.value)


def test_gather_refuses_more_rows_than_the_samples_have() -> None:
    cause = (
        "gather: the ranks have 9 rows for 7 samples; pass one row for each sample, of one epoch"
    )
    assert both(_gather_two_epochs) == [cause] * 2


class Epochs(Dataset[int]):
    """Its samples are the epoch, and a random number."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.epoch, int(torch.randint(1 << 30, ()))])

    def __len__(self) -> int:
        return 4


def _epochs(options: dict[str, Any]) -> list[Any]:
    options = {"shuffle": False, **options}
    loader = helper.get_dataloader_for_distributed(Epochs(), 1, **options)
    before = torch.random.get_rng_state()
    found = [torch.cat([*loader]).tolist() for _ in range(3)]
    if "num_workers" in options:
        assert torch.equal(torch.random.get_rng_state(), before)
        again = helper.get_dataloader_for_distributed(Epochs(), 1, **options)
        for done in (0, 1):  # of this rank's two samples
            again.sampler.set_epoch(2, done=done)  # type: ignore[attr-defined]
            assert torch.cat([*again]).tolist() == found[2][done:]
    return [{epoch for epoch, _ in part} for part in found] + [found[0]]


PERSISTENT = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, PERSISTENT])
def test_a_dataset_hears_of_each_epoch_and_its_workers_repeat(options: dict[str, Any]) -> None:
    first, other = both(_epochs, options)
    assert first[:3] == other[:3] == [{0}, {1}, {2}]
    assert not options or first[3] != other[3]  # the ranks draw other numbers


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


def test_the_loaders_data_set_has_the_attributes_of_the_scripts() -> None:
    data = Epochs()
    loader = helper.get_dataloader_for_distributed(data, 2, shuffle=False)
    found: Any = pickle.loads(pickle.dumps(loader.dataset))  # as for a spawned worker
    assert len(found) == 4 and found.epoch == -1 and not hasattr(found, "other")
    next(iter(loader))
    assert found.dataset.epoch == -1 and data.epoch == 0


def test_a_subset_is_read_sample_by_sample() -> None:
    loader = helper.get_dataloader_for_distributed(Subset(Epochs(), [3, 1]), 2, shuffle=False)
    assert hasattr(Subset, "__getitems__") and len(next(iter(loader))) == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_subset_of_a_dataset_that_reads_batches_reads_batches(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """random_split() returns Subsets."""
    data: Any = Batches()
    for _ in range(depth):
        data = Subset(data, range(len(data)))
    monkeypatch.delattr(Epochs, "__getitem__")  # only whole batches can be read
    found: Any = torch.cat([*helper.get_dataloader_for_distributed(data, 2, shuffle=False)])
    assert [index for index, _ in found.tolist()] == [0, 1, 2, 3]


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


class Batches(Epochs):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [torch.tensor([index, int(torch.randint(1 << 30, ()))]) for index in indices]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_reads_batches_does_so(workers: int) -> None:
    def read(done: int) -> list[Any]:
        loader = helper.get_dataloader_for_distributed(
            Batches(), 2, shuffle=False, num_workers=workers
        )
        loader.sampler.set_epoch(0, done=done)  # type: ignore[attr-defined]
        return torch.cat([*loader]).tolist()

    whole = read(0)
    assert [index for index, _ in whole] == [0, 1, 2, 3]
    assert not workers or read(2) == whole[2:]
