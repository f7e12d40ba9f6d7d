"""An endless stream of batches that can resume anywhere; each rank's share of a dataset."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data import get_worker_info as worker_info

from distributed.environment import Environment
from distributed.stop import ignore_signals
from distributed.torch import seed_everything
from training.config_file import SettingsError
from training.settings import Settings

GROUP = 1 << 16  # samples that are shuffled together
START = {"step": 0, "epoch": 0, "samples": 0}


class Batches:
    """An endless stream of this rank's batches, epoch after epoch, each epoch in its own order.

    A stream that starts at another's `position()` does not read the samples before it. It returns
    the same batches, drawn with the same random numbers, as an uninterrupted stream. Creating it
    draws no random numbers of this process.

    Raises:
        SettingsError: the dataset is too small for one batch on each rank.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,  # samples of one rank's batch
        settings: Settings,
        environment: Environment,
        position: Mapping[str, Any] = START,
    ) -> None:
        self._rank, ranks = environment.rank, environment.world_size
        self._length, self._block = len(dataset), getattr(dataset, "block", 1)  # type: ignore[arg-type]
        self._seed, self._ranks = settings.seed, ranks
        self.samples = batch_size * ranks  # of one batch on all ranks
        self.per_epoch = self._length // ranks // batch_size
        if self.per_epoch == 0:
            raise SettingsError(f"data: too little for {ranks} batches of {batch_size}")
        self._done = position["epoch"] * self.per_epoch + position["samples"] // self.samples
        stream = DataLoader(
            _Seeded(dataset, settings.seed),
            batch_sampler=self._samples(*divmod(self._done, self.per_epoch)),
            num_workers=settings.data.num_workers,
            pin_memory=settings.data.pin_memory,
            worker_init_fn=ignore_signals,
            generator=torch.Generator(),
        )
        self._rest = iter(stream)

    def __next__(self) -> Any:
        self._done += 1
        return next(self._rest)

    def _samples(self, epoch: int, done: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the (epoch, index) pairs of each batch, without end, from batch `done` on."""
        while True:
            key, skip = f"{self._seed} {epoch}", done * self.samples
            order = shuffled(self._length, self._block, key, skip)
            for _ in range(done, self.per_epoch):
                batch = itertools.islice(order, self.samples)  # of all ranks
                share = itertools.islice(batch, self._rank, None, self._ranks)
                yield [(epoch, index) for index in share]
            epoch, done = epoch + 1, 0

    def position(self) -> dict[str, int]:
        """Return the epochs done, and the samples of the next one that all ranks have read."""
        epoch, batch = divmod(self._done, self.per_epoch)
        return {"epoch": epoch, "samples": batch * self.samples}


def shuffled(length: int, block: int, key: str, skip: int = 0) -> Iterator[int]:
    """Yield the numbers below `length` in the order that belongs to a key, from number `skip` on.

    Each block of neighbours is read from one place. The blocks are shuffled, and then the samples
    of GROUP of them together, so that nothing grows with the data but the list of its blocks.
    """
    blocks = torch.randperm(math.ceil(length / block), generator=_generator(key))
    for number, group in enumerate(torch.split(blocks, GROUP // block)):
        samples = (group[:, None] * block + torch.arange(block)).flatten()
        samples = samples[samples < length]
        if skip < len(samples):
            order = torch.randperm(len(samples), generator=_generator(f"{key} {number}"))
            yield from samples[order[skip:]].tolist()
        skip = max(0, skip - len(samples))


def _generator(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(key.encode()))


class _Seeded(Dataset[Any]):
    """A dataset that seeds a worker process before each sample.

    The seed depends on the run's seed, the epoch and the sample alone, so it does not matter which
    worker reads the sample. Without workers, samples use the training process's own generators,
    which are part of each checkpoint.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, sample: tuple[int, int]) -> Any:
        epoch, index = sample
        if worker_info() is not None:
            seed_everything(zlib.crc32(f"{self._seed} {epoch} {index}".encode()))
        return self._dataset[index]


def share_of(dataset: Dataset[Any], rank: int, world_size: int) -> Dataset[Any]:
    """Return every world_size-th sample, starting at `rank`: each sample is on exactly one rank."""
    return Subset(dataset, range(rank, len(dataset), world_size))  # type: ignore[arg-type]


def move(batch: Any, device: torch.device) -> Any:
    """Return a batch with all tensors in its tuples, lists and dicts moved to the device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
