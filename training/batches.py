"""An endless stream of batches that knows its place; a rank's share of data; moving to a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Batches:
    """A training loader's batches, epoch after epoch, each in its own order.

    The place is (`epoch`, `done`), where `done` counts the batches of the epoch already given out.
    A stream can be opened at any place without reading what lies before.
    """

    def __init__(self, loader: DataLoader[Any], *, epoch: int = 0, done: int = 0) -> None:
        self._loader = loader
        self.epoch = epoch
        self.done = done
        self._rest = self._open()

    def __next__(self) -> Any:
        batch = next(self._rest, None)
        if batch is None:
            self.epoch, self.done = self.epoch + 1, 0
            self._rest = self._open()
            batch = next(self._rest)
        self.done += 1
        return batch

    def _open(self) -> Iterator[Any]:
        loader = self._loader
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(self.epoch)
        if not self.done:
            return iter(loader)
        assert loader.batch_sampler is not None
        rest: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=list(islice(loader.batch_sampler, self.done, None)),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
        )
        return iter(rest)


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
