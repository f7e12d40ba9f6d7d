"""An endless stream of batches that knows its place; a rank's share of data; moving to a GPU."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, get_worker_info

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
            batch_sampler=_places(loader, done),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=ignore_signals,
            generator=torch.Generator(),
        )
        self._rest = iter(stream)

    def __next__(self) -> Any:
        self.done += 1
        return next(self._rest)


def _places(loader: DataLoader[Any], done: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the (epoch, index) pairs of each batch after the first `done`, without end."""
    epoch, done = divmod(done, len(loader))
    assert loader.batch_sampler is not None
    while True:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader.batch_sampler):
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
            seed_everything(zlib.crc32(f"{self._seed} {epoch} {index}".encode()))
        return self._dataset[index]


def share_of(dataset: Dataset[Any], rank: int, world_size: int) -> Dataset[Any]:
    """Return every world_size-th sample from `rank` on: each sample on one rank, none twice."""
    return Subset(dataset, range(rank, len(dataset), world_size))  # type: ignore[arg-type]


def move(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors, in tuples, lists and dicts as it has them, on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
