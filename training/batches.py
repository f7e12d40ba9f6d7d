"""An endless stream of batches that knows its place; a rank's share of data; moving to a GPU."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    Subset,
    get_worker_info,
)

from distributed.stop import ignore_signals
from distributed.torch import seed_everything


class Batches:
    """A training loader's batches, epoch after epoch, each in its own order.

    `done` counts the batches given out. A stream can be opened at any place without reading what
    lies before, and gives the same batches, drawn with the same random numbers, as one that was
    never interrupted. Opening it draws none of this process's own.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int, done: int = 0) -> None:
        self.done = done
        stream = DataLoader(
            _Seeded(loader.dataset, seed),
            batch_sampler=_Order(loader, done),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=ignore_signals,
            generator=torch.Generator(),
        )
        self._rest = iter(stream)

    def __next__(self) -> Any:
        self.done += 1
        return next(self._rest)


class _Order(Sampler[list[tuple[int, int]]]):
    """The (epoch, index) pairs of each batch, without end."""

    def __init__(self, loader: DataLoader[Any], done: int) -> None:
        self._loader = loader
        self._done = done

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, done = divmod(self._done, len(self._loader))
        assert self._loader.batch_sampler is not None
        while True:
            if isinstance(self._loader.sampler, DistributedSampler):
                self._loader.sampler.set_epoch(epoch)
            for number, batch in enumerate(self._loader.batch_sampler):
                if number >= done:
                    yield [(epoch, index) for index in batch]
            epoch, done = epoch + 1, 0


class _Seeded(Dataset[Any]):
    """A dataset whose samples, read by a worker process, draw numbers of their own.

    They depend on the seed, the epoch and the sample alone, not on which worker reads it or what
    it read before. In the training process its own generators do, which checkpoints hold.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, index = place
        if get_worker_info() is not None:
            own_seed = zlib.crc32(f"{self._seed} {epoch} {index}".encode())
            seed_everything(own_seed)
        return self._dataset[index]


def share_of(dataset: Dataset[Any], rank: int, world_size: int) -> Dataset[Any]:
    """Return every world_size-th sample from `rank` on: each sample on one rank, none twice."""
    return Subset(dataset, range(rank, len(dataset), world_size))  # type: ignore[arg-type]


def move(batch: Any, device: torch.device) -> Any:
    """Return a batch, a tensor or tensors in tuples, lists and dicts, on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [move(value, device) for value in batch]
    return batch
