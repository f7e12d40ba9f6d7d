"""Each rank's share of a data set: an order that can resume anywhere, and repeatable numbers."""

from __future__ import annotations

import random
import signal
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, repeat
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    get_worker_info,
)

from .collectives import count_ranks, own_rank
from .environment import check_numbers
from .stop_signals import handled_signals


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch, its GPUs, Python and NumPy (if it is imported), differently for each rank.

    For the same weights on every rank, call it without a rank before you create the model.
    """
    own_seed = (seed + 1_000_003 * rank) % 2**32
    torch.manual_seed(own_seed)
    random.seed(own_seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own_seed)


class EpochSampler(DistributedSampler[Any]):
    """Yields this rank's samples as (epoch, index); a new epoch each time it is iterated over."""

    done = 0
    order: Callable[[int, int], Iterable[int]] | None = None  # of an epoch, without the first ones

    def set_epoch(self, epoch: int, done: int = 0) -> None:
        """Set the next epoch; without this rank's first `done` samples, which a run has seen."""
        super().set_epoch(epoch)
        self.done = done

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Return this rank's samples of the next epoch, and set the one after it.

        Every `ranks`-th sample belongs to this rank. `order`, if set, gives those of all ranks.
        """
        epoch = self.epoch
        ranks = self.num_replicas
        skip = self.done * ranks  # samples that all ranks together have seen
        if self.order is None:
            samples = islice(super().__iter__(), self.done, None)
        else:  # needs drop_last: no samples are repeated to fill up the last ones
            left = max(0, self.total_size - skip)  # samples of all ranks
            samples = islice(self.order(epoch, skip), self.rank, left, ranks)
        self.epoch = epoch + 1
        self.done = 0
        return zip(repeat(epoch), samples)


class Seeded(Dataset[Any]):
    """A data set whose samples draw the same random numbers in any worker, read as (epoch, index).

    If `dataset` has a `set_epoch`, it is called at the first sample of each epoch. A worker process
    is seeded before each sample; the seed depends only on the loader's seed, the epoch and the
    sample. Without workers, samples use the training process's own generators, which are part of
    each checkpoint. All other attributes are those of `dataset`.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed
        self._epoch = -1

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("dataset"), name)  # without one while it is unpickled

    def __getitem__(self, sample: tuple[int, int]) -> Any:
        self._begin_sample(*sample)
        return self.dataset[sample[1]]

    @property
    def __getitems__(self) -> Callable[[list[tuple[int, int]]], Any] | None:
        """The function that reads a batch at once, or None: then torch reads each sample.

        The random numbers then belong to the batch. A Subset always has the method, but reads
        sample by sample if the data set in it, which may be another Subset, has none.
        """
        inner = self.dataset
        while isinstance(inner, Subset):
            inner = inner.dataset
        return self._read_batch if hasattr(inner, "__getitems__") else None

    def _read_batch(self, samples: list[tuple[int, int]]) -> Any:
        """Return the samples, given as (epoch, index); the first one's epoch and seed apply."""
        self._begin_sample(*samples[0])
        return self.dataset.__getitems__([index for _, index in samples])

    def _begin_sample(self, epoch: int, index: int) -> None:
        """Tell the data set of a new epoch and, in a worker process, seed its generators."""
        if epoch != self._epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)  # here, because a worker has its own copy of the data set
        self._epoch = epoch
        if get_worker_info() is not None:
            seed_everything(zlib.crc32(f"{self._seed} {epoch} {index}".encode()))


def get_dataloader_for_distributed(
    dataset: Dataset[Any],
    batch_size: int,
    world_size: int | None = None,
    rank: int | None = None,
    *,
    shuffle: bool,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> DataLoader[Any]:
    """Return a loader over this rank's share of a dataset, with `batch_size` samples per process.

    All ranks get the same number of samples: unless `drop_last`, some ranks repeat a sample at the
    end. Each iteration over the loader is a new epoch, with `shuffle` in a new order: epochs 0, 1,
    2 and so on, or n, n + 1 and so on after `loader.sampler.set_epoch(n)`; with `done=samples`,
    epoch n begins after this rank's first samples. If the dataset has a `set_epoch`, each process
    that reads it calls that first. In workers, the random numbers that a sample draws depend on
    `seed`, the epoch and the sample, or the batch's first sample if the dataset reads whole batches
    (`__getitems__`). Workers ignore stop signals other than SIGTERM.

    `loader.dataset` is a Seeded, with the dataset's attributes. World size and rank are the process
    group's; `options` are DataLoader's own, such as `collate_fn`. Raises ValueError for any other
    world size or rank, for a sampler, and for an IterableDataset, which cannot be sharded.
    """
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"{type(dataset).__name__} is an IterableDataset, whose samples cannot be divided; "
            "make its __iter__ skip other ranks' samples, and pass it to DataLoader"
        )
    if given := sorted({"sampler", "batch_sampler"} & options.keys()):
        raise ValueError(
            f"{given[0]}= is not divided among the ranks; "
            "give DataLoader one that yields only this rank's samples"
        )
    check_numbers(
        "this run's is",
        ("world_size", world_size, count_ranks()),
        ("rank", rank, own_rank()),
    )

    seeded = Seeded(dataset, seed)
    sampler = EpochSampler(
        seeded, count_ranks(), own_rank(), shuffle=shuffle, seed=seed, drop_last=drop_last
    )

    # Otherwise, each epoch would draw a number from the training's own generator.
    options["generator"] = options.get("generator") or torch.Generator()
    options["worker_init_fn"] = partial(_begin_worker, options.get("worker_init_fn"))
    return DataLoader(seeded, batch_size, sampler=sampler, drop_last=drop_last, **options)


def _begin_worker(then: Callable[[int], object] | None, number: int) -> None:
    """Ignore stop signals, which schedulers send to workers too, and call the user's function.

    SIGTERM keeps torch's handler, because a rank ends its workers with it.
    """
    for signum in handled_signals():
        if signum != signal.SIGTERM:
            signal.signal(signum, signal.SIG_IGN)
    if then is not None:
        then(number)
