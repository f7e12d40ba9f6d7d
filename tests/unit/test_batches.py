"""The stream of batches: each epoch's order, each rank's share, and going on from any point."""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from distributed.environment import detect
from training import batches
from training.batches import Batches, move, share_of, shuffled
from training.config_file import SettingsError
from training.settings import Data, Settings, Train
from training.tasks import Task


class Given(Task):
    """A task with this data."""

    def __init__(self, data: Any) -> None:
        self.train = self.validation = data

    def model(self) -> nn.Module:
        raise AssertionError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError


def stream_of(
    data: Any, rank: int = 0, *, ranks: int = 1, at: Any = batches.START, workers: int = 0
) -> Batches:
    """Return the batches of 4 of one rank of a task, or of one that has this data."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    train = Train(batch_size=1, max_seconds=1)
    settings = Settings(seed=3, train=train, data=Data(num_workers=workers))
    task = data if isinstance(data, Given) else Given(data)
    return Batches(task, 4, settings, detect(place), at)


@pytest.mark.parametrize("length", [1, 7, 256, 1000, 70_000])
@pytest.mark.parametrize("block", [1, 256])
def test_each_sample_comes_once(length: int, block: int) -> None:
    order = list(shuffled(length, block, "1 0"))
    assert sorted(order) == list(range(length))
    if length > 7:
        assert order != sorted(order)
        assert order != list(shuffled(length, block, "1 1"))


@pytest.mark.parametrize("skip", [0, 1, 31, 32, 33, 64, 99, 100, 101])
def test_it_goes_on_from_any_sample(monkeypatch: pytest.MonkeyPatch, skip: int) -> None:
    monkeypatch.setattr(batches, "GROUP", 32)
    whole = list(shuffled(100, 8, "1 0"))
    assert list(shuffled(100, 8, "1 0", skip)) == whole[skip:]


def test_samples_that_come_together_are_of_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "GROUP", 1024)
    order = list(shuffled(100_000, 256, "1 0"))
    first = {sample // 256 for sample in order[:1024]}
    assert len(first) <= 5
    assert len({sample // 256 for sample in order[:8]}) > 1


@pytest.mark.parametrize("done", range(9))
def test_a_stream_opened_anywhere_goes_on_as_if_it_had_come_there(done: int) -> None:
    dataset = TensorDataset(torch.arange(17))
    whole = stream_of(dataset)
    for _ in range(done):
        next(whole)
    opened = stream_of(dataset, at=whole.position())
    assert opened.position() == {"epoch": done // 4, "samples": done % 4 * 4}
    expected = [next(whole)[0].tolist() for _ in range(9)]
    assert [next(opened)[0].tolist() for _ in range(9)] == expected
    assert opened.position() == whole.position()


@pytest.mark.parametrize("rank", [0, 1])
def test_batches_are_named_by_their_samples(rank: int) -> None:
    stream = stream_of(TensorDataset(torch.arange(17)), rank, ranks=2)
    read: list[str] = []
    for _ in range(7):  # over three epochs
        with pytest.raises(ValueError, match=r"^broken") as raised, stream.noted(-1):
            raise ValueError("broken")
        read += map(str, next(stream)[0].tolist())
        assert stream.describe() == f"samples {', '.join(read[-4:])}"
        assert raised.value.__notes__ == [f"the batch has {stream.describe()}"]  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"^broken") as raised, stream.noted():
            raise ValueError("broken")
        assert raised.value.__notes__ == [f"the batch has {stream.describe()}"]  # type: ignore[attr-defined]
    assert stream.describe(back=2, count=3) == f"samples {', '.join(read[8:20])}"
    assert stream.describe(back=0, count=7) == f"samples {', '.join(read[:16])}, ..."


def test_samples_without_numbers_have_no_names() -> None:
    stream = stream_of(Stream(22))
    next(stream)
    assert stream.describe() == ""
    with pytest.raises(ValueError, match=r"^broken") as raised, stream.noted():
        raise ValueError("broken")
    assert not hasattr(raised.value, "__notes__")


class Drawn(Dataset[Any]):
    """Every sample is three random numbers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1).item(), random.random(), float(numpy.random.rand())


def test_a_worker_draws_by_sample_not_by_what_it_read_before() -> None:
    def draw(workers: int, done: int) -> list[list[list[float]]]:
        position = {"epoch": done // 3, "samples": done % 3 * 4}
        batches = stream_of(Drawn(), at=position, workers=workers)
        return [torch.stack(next(batches)).tolist() for _ in range(6 - done)]

    whole = draw(1, 0)
    assert draw(2, 0) == whole
    assert draw(2, 4) == whole[4:]
    assert len({number for batch in whole for numbers in batch for number in numbers}) == 72


def test_a_stream_and_its_workers_end_with_what_reads_it() -> None:
    """Its workers would keep the process from ending for half a minute."""
    before = {child.pid for child in multiprocessing.active_children()}
    stream = stream_of(Drawn(), workers=1)
    next(stream)
    (worker,) = [one for one in multiprocessing.active_children() if one.pid not in before]
    gc.disable()
    try:
        del stream
        worker.join(20)
    finally:
        gc.enable()
    assert not worker.is_alive()


def test_shares_are_uneven_and_hold_each_sample_once() -> None:
    dataset = TensorDataset(torch.arange(10))
    shares = [share_of(dataset, rank=rank, world_size=4) for rank in range(4)]
    found = [[int(share[i][0]) for i in range(len(share))] for share in shares]  # type: ignore[arg-type]
    assert [len(share) for share in found] == [3, 3, 2, 2]
    assert sorted(n for share in found for n in share) == list(range(10))


def test_batches_of_any_build_move() -> None:
    here = torch.device("meta")
    moved = move({"a": [torch.ones(1), (torch.ones(2), "text")]}, here)
    assert moved["a"][0].device == moved["a"][1][0].device == here
    assert moved["a"][1][1] == "text"


class Stream(IterableDataset[int]):
    """Can only be read in order."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


@pytest.mark.parametrize("done", range(6))
def test_data_without_a_length_is_shared_out_and_goes_on_anywhere(done: int) -> None:
    both = []
    for rank in (0, 1):
        whole = stream_of(Stream(22), rank, ranks=2)
        assert whole.per_epoch is None
        read = [next(whole).tolist() for _ in range(6)]
        assert read == [*read[:2]] * 3  # two whole batches of eight in each epoch
        both += read[0] + read[1]
        whole = stream_of(Stream(22), rank, ranks=2)
        for _ in range(done):
            next(whole)
        opened = stream_of(Stream(22), rank, ranks=2, at=whole.position())
        assert [next(opened).tolist() for _ in range(4)] == [next(whole).tolist() for _ in range(4)]
    assert sorted(both) == list(range(16))


def test_data_that_fills_no_batch_is_refused() -> None:
    with pytest.raises(SettingsError, match="too little for 1 batches of 4"):
        stream_of(TensorDataset(torch.arange(3)))
    with pytest.raises(SettingsError, match="epoch 0 has no batch for each rank"):
        next(stream_of(Stream(3)))


class Loading(Given):
    """Reads its data itself."""

    def loader(
        self, batch_size: int, *, rank: int, world_size: int, epoch: int, skip: int
    ) -> Iterator[str]:
        return (f"{epoch}.{n} {rank}/{world_size} x {batch_size}" for n in range(skip, 3))


def test_a_task_may_load_its_data_itself() -> None:
    stream = stream_of(Loading(None), 1, ranks=2)
    read = [next(stream) for _ in range(5)]
    assert read == [f"{n // 3}.{n % 3} 1/2 x 4" for n in range(5)]
    assert stream.position() == {"epoch": 1, "samples": 16}
    assert next(stream_of(Loading(None), 1, ranks=2, at=stream.position())) == "1.2 1/2 x 4"


def test_a_batch_is_made_by_the_tasks_own_function() -> None:
    task = Given(list(range(8)))
    task.collate = sorted
    stream = stream_of(task)
    first, second = next(stream), next(stream)
    assert first == sorted(first) and sorted([*first, *second]) == list(range(8))
