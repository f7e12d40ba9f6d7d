"""An endless stream of batches that can resume anywhere; each rank's share of a dataset."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Subset
from torch.utils.data import get_worker_info as worker_info

from distributed.environment import Environment
from distributed.stop import ignore_signals
from distributed.torch import seed_everything
from training.config_file import SettingsError
from training.settings import Settings

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
        ranks, seed = environment.world_size, settings.seed
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=ranks, rank=environment.rank, seed=seed, drop_last=True
        )
        self.samples = batch_size * ranks  # of one batch on all ranks
        self.per_epoch = len(sampler) // batch_size
        if self.per_epoch == 0:
            raise SettingsError(f"data: too little for {ranks} batches of {batch_size}")
        self._done = position["epoch"] * self.per_epoch + position["samples"] // self.samples
        stream = DataLoader(
            _Seeded(dataset, seed),
            batch_sampler=_samples(sampler, batch_size, *divmod(self._done, self.per_epoch)),
            num_workers=settings.data.num_workers,
            pin_memory=settings.data.pin_memory,
            worker_init_fn=ignore_signals,
            generator=torch.Generator(),
        )
        self._rest = iter(stream)

    def __next__(self) -> Any:
        self._done += 1
        return next(self._rest)

    def position(self) -> dict[str, int]:
        """Return the epochs done, and the samples of the next one that all ranks have read."""
        epoch, batch = divmod(self._done, self.per_epoch)
        return {"epoch": epoch, "samples": batch * self.samples}


def _samples(
    sampler: DistributedSampler[Any], batch_size: int, epoch: int, done: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield the (epoch, index) pairs of each batch, without end, from batch `done` of an epoch."""
    for number in itertools.count(epoch):
        sampler.set_epoch(number)
        batches = BatchSampler(sampler, batch_size, drop_last=True)
        for batch in itertools.islice(batches, done if number == epoch else 0, None):
            yield [(number, index) for index in batch]


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
