"""An endless stream of batches that can resume anywhere; each rank's share of a dataset."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import signal
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from distributed.checkpoint import rng_state, set_rng_state
from distributed.environment import Environment
from distributed.heartbeat import beat
from distributed.stop_signals import STOP_SIGNALS
from distributed.torch import gather_json, get_dataloader_for_distributed, seed_everything
from distributed.torch_internals import tree_map_only
from training.config_file import SettingsError
from training.settings import Settings
from training.tasks import Task

GROUP = 1 << 16  # samples that are shuffled together
_MOST = 16  # samples that a message lists


START = {"step": 0, "epoch": 0, "samples": 0}


def check_sizes(sizes: list[int]) -> None:
    """Raise SettingsError if the numbers of samples differ between ranks. All must call this."""
    all_sizes = gather_json(sizes)
    if odd := next((rank for rank, one in enumerate(all_sizes) if one != all_sizes[0]), 0):
        raise SettingsError(f"data: ranks 0 and {odd} differ; give all nodes the same data")


class Batches:
    """An endless stream of this rank's batches, epoch after epoch, each epoch in its own order.

    A stream that starts at another stream's `position()` returns what that stream would have
    returned next: the same batches, with the same random numbers. Only data without a length must
    be read again up to that position. Creating a stream leaves this process's random generators
    unchanged. Raises SettingsError if the dataset is too small for one batch on each rank, which
    without a length shows only when it is read, or if validation data is needed but missing.
    """

    def __init__(
        self,
        task: Task,
        batch_size: int,  # samples of one rank's batch
        settings: Settings,
        environment: Environment,
        position: Mapping[str, Any] = START,
    ) -> None:
        rank = environment.rank
        world_size = environment.world_size
        self.samples = batch_size * world_size  # of one batch on all ranks
        self.per_epoch: int | None = None  # batches, if known
        # Lengths of the data, for check_sizes(): validation's and, if it has one, train's.
        self.sizes = [len(task.validation)]  # type: ignore[arg-type]
        if settings.train.eval_every and not self.sizes[0]:
            raise SettingsError(
                "data: validation has no samples; give it samples, or set train.eval_every=0"
            )
        self._epoch = position["epoch"]
        self._batch = position["samples"] // self.samples  # within the epoch
        self._sampler: Any = None  # of data with a length

        load: Any
        if type(task).loader is not Task.loader:  # the task makes its own batches
            load = functools.partial(task.loader, batch_size, rank=rank, world_size=world_size)
        elif isinstance(task.train, IterableDataset):  # every rank reads all samples, in order
            own = slice(rank, self.samples, world_size)  # of each batch on all ranks
            load = functools.partial(_read_all, task, own, settings.seed)
        else:
            loader = _make_loader(task, batch_size, settings)
            load = functools.partial(_begin_epoch, loader)
            self._sampler = loader.sampler
            self.sizes.append(len(task.train))  # type: ignore[arg-type]
            self.per_epoch = len(loader)
            if self.per_epoch == 0:
                raise SettingsError(f"data: too small for one batch of {batch_size} per rank")

        self._rest = _read_epochs(load, self._epoch, self._batch)

    def __next__(self) -> Any:
        with self.naming_samples(-1):
            self._epoch, self._batch, batch = next(self._rest)
        if self._batch == self.per_epoch:  # the end of an epoch is the beginning of the next
            self._epoch += 1
            self._batch = 0
        return batch

    @contextlib.contextmanager
    def naming_samples(self, back: int = 0) -> Iterator[None]:
        """Add to an exception the samples of the newest batch; with -1, those of the next one."""
        try:
            yield
        except Exception as error:
            if samples := self.describe(back):
                notes = [*getattr(error, "__notes__", []), f"the batch has {samples}"]  # PEP 678
                error.__notes__ = notes  # type: ignore[attr-defined]
            raise

    def describe(self, back: int = 0, count: int = 1) -> str:
        """Return as text the first 16 sample numbers of `count` batches.

        The last of these batches was read `back` batches ago. "" if samples have no numbers, as in
        data without a length, or from the task's own loader.
        """
        if self.per_epoch is None:
            return ""

        sampler = self._sampler
        samples = list[str]()
        first = self._epoch * self.per_epoch + self._batch - back - count
        for number in range(first, first + count):
            epoch, done = divmod(number, self.per_epoch)
            order = sampler.order(epoch, done * self.samples)
            own = itertools.islice(order, sampler.rank, self.samples, sampler.num_replicas)
            samples += map(str, own)
        return f"samples {', '.join(samples[:_MOST])}{', ...' if len(samples) > _MOST else ''}"

    def position(self) -> dict[str, int]:
        """Return the epochs done, and how many samples of the next epoch the ranks have read."""
        return {"epoch": self._epoch, "samples": self._batch * self.samples}


# The streams below do not refer to the Batches that reads them: a reference cycle would keep both
# and their worker processes alive after a run.


def _make_loader(task: Task, batch_size: int, settings: Settings) -> DataLoader[Any]:
    """Return a loader of data with a length that reads it in the order of `shuffled`.

    The sampler's own order would be a list of all samples.
    """
    data: Any = task.train
    workers = settings.data.num_workers
    # shuffle must be given, but has no effect: `order` replaces it. `order` needs drop_last.
    loader = get_dataloader_for_distributed(
        data,
        batch_size,
        shuffle=True,
        seed=settings.seed,
        drop_last=True,
        collate_fn=task.collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=settings.data.pin_memory,
        worker_init_fn=_ignore_signals,  # SIGTERM too, unlike the helper
    )

    loader.sampler.order = lambda epoch, skip: shuffled(  # type: ignore[attr-defined]
        len(data), getattr(data, "block", 1), f"{settings.seed} {epoch}", skip
    )
    return loader


def _ignore_signals(_worker: int) -> None:
    """Ignore stop signals in a data worker, because schedulers send them to workers too.

    The rank needs batches until the end of its step. A worker ends when the rank closes the loader
    or exits.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _begin_epoch(loader: Any, *, epoch: int, skip: int) -> Iterable[Any]:
    """Return the loader, set to an epoch without its first `skip` batches."""
    loader.sampler.set_epoch(epoch, done=skip * loader.batch_size)
    return loader  # type: ignore[no-any-return]


def _read_epochs(
    load: Callable[..., Iterable[Any]], epoch: int, done: int
) -> Iterator[tuple[int, int, Any]]:
    """Yield (epoch, number of batches read in it, batch), epoch after epoch, without end.

    `load(epoch=, skip=)` returns the batches of an epoch without the first `skip`. Begins after the
    first `done` batches of `epoch`. Raises SettingsError if an epoch has no batch.
    """
    while True:
        number = done
        for number, batch in enumerate(load(epoch=epoch, skip=done), done + 1):
            yield epoch, number, batch
        if number == 0:
            cure = "iter(train) must start again in each epoch" if epoch else "give it more samples"
            raise SettingsError(f"data: epoch {epoch} is too small for one batch per rank; {cure}")
        epoch += 1
        done = 0


def _read_all(task: Task, own: slice, seed: int, *, epoch: int, skip: int) -> Iterator[Any]:
    """Yield a rank's part of each batch of data that can only be read in order.

    The batches begin after the first `skip`; an incomplete last one is dropped. `own` takes the
    rank's samples from those of all ranks. The data has its own random numbers, the same on every
    rank and each time it is read. Those of the training do not change.
    """
    outside = rng_state()
    seed_everything(zlib.crc32(f"{seed} {epoch}".encode()))
    if hasattr(task.train, "set_epoch"):
        task.train.set_epoch(epoch)

    make_batch = task.collate or default_collate
    stream = iter(task.train)
    size = own.stop  # samples of a batch on all ranks
    groups = iter(lambda: list(itertools.islice(stream, size)), [])  # up to an empty one
    for number, group in enumerate(groups):
        beat()  # reading what was trained on before can take long
        if number >= skip and len(group) == size:
            inside = rng_state()
            set_rng_state(outside)
            yield make_batch(group[own])
            outside = rng_state()
            set_rng_state(inside)
    set_rng_state(outside)


def shuffled(length: int, block: int, key: str, skip: int = 0) -> Iterator[int]:
    """Yield the numbers below `length` in an order that `key` determines, without the first `skip`.

    Neighbouring samples form blocks, so that a group is read from few places. Blocks are shuffled
    first, then the samples in each group of blocks (GROUP samples), so that only the list of blocks
    grows with the data.
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
    """Return a generator on the CPU, with a seed that depends only on the key."""
    return torch.Generator().manual_seed(zlib.crc32(key.encode()))


def share_of(dataset: Dataset[Any], rank: int, world_size: int) -> Dataset[Any]:
    """Return every world_size-th sample, starting at `rank`: each sample is on exactly one rank."""
    return Subset(dataset, range(rank, len(dataset), world_size))  # type: ignore[arg-type]


def fill_up(
    loader: DataLoader[Any], dataset: Dataset[Any], in_step: int
) -> Iterator[tuple[Any, bool]]:
    """Yield the batches of a rank's share of a dataset, and whether each counts.

    The first sample fills gaps, so that all `in_step` ranks, which share a model, get the same
    number of batches. A rank without samples gets one such batch in any case, because each rank
    must know which metrics there are.
    """
    yield from ((batch, True) for batch in loader)
    samples = in_step * (loader.batch_size or 1)
    rounds = math.ceil(len(dataset) / samples) if in_step > 1 else 1  # type: ignore[arg-type]
    for _ in range(len(loader), rounds):
        yield loader.collate_fn([dataset[0]]), False


def move(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors moved to the device.

    They are looked for in tuples, lists, dicts, and other mutable mappings, which are copied. An
    object that has a method `to` is moved by that, and any other object stays.
    """

    def has_to(part: Any) -> bool:
        """Whether it has a method `to`; a field of a tuple or a key can have this name, too."""
        return callable(getattr(type(part), "to", None))

    def move_one(part: Any) -> Any:
        """Move what tree_map_only() does not look into."""
        if isinstance(part, Tensor):
            return part.to(device, non_blocking=True)
        if has_to(part):  # such as transformers' BatchEncoding
            moved = part.to(device)
            return part if moved is None else moved  # it may have been moved in place
        if isinstance(part, MutableMapping):  # tree_map_only() knows only dict itself
            moved = copy.copy(part)
            for key, value in part.items():
                moved[key] = move(value, device)
            return moved
        return part

    # A PackedSequence is a tuple, of which one tensor must stay on the CPU.
    return tree_map_only(object, move_one, batch, is_leaf=has_to)
