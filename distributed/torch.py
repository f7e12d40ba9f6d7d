"""What a training script needs to run unchanged on one process or on many.

    env = init_distributed()                            # join the others; does nothing when alone
    seed_everything(42, env.rank)
    model = setup_distributed_models(model)             # on the device, wrapped in DDP
    loader = get_dataloader_for_distributed(dataset, batch_size=32, shuffle=True)
    metrics = sync_metrics({"loss": loss}, weight=samples)

Needs torch alone. It has no state of its own: the process group is torch's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from . import network
from .collectives import freed, take_first_ranks
from .collectives import gather_bytes as gather_bytes
from .collectives import gather_json as gather_json
from .environment import Environment, LauncherError, detect
from .exit import finish as finish
from .heartbeat import beat as beat
from .rendezvous import rendezvous
from .strategy import Sharding as Sharding
from .strategy import check_strategy


def init_distributed(
    *,
    backend: str | None = None,
    join_timeout_s: float = 300,
    timeout_s: float = 1800,
    local_rank: int | None = None,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
) -> Environment:
    """Choose this process's device and, if there are other ranks, join them in a process group.

    Args:
        backend: "nccl" or "gloo"; None or "auto": $BACKEND, else nccl with GPUs, else gloo.
        join_timeout_s: limit until all ranks have joined.
        timeout_s: limit for one collective.
        local_rank: the --local-rank argument of torch.distributed.launch.
        nodes, ranks_per_node: refuse any other number.

    Returns this process's environment, with rank 0's run id. Raises LauncherError if variables,
    ranks or GPUs contradict each other, TimeoutError with the ranks that did not join, and
    ValueError for nccl without a GPU.
    """
    env = detect(local_rank=local_rank)
    for name, asked, given in (
        ("--nodes", nodes, env.num_nodes),
        ("--gpus-per-node", ranks_per_node, env.local_world_size),
    ):
        if asked not in (None, given):
            cause = f"{name} is {asked} but {env.launcher} started {given}"
            raise LauncherError(f"{cause}; make them agree")
    backend = _choose_backend(backend, env)
    if torch.cuda.is_available():
        # Some launchers show each rank all GPUs of the node, others only its own.
        torch.cuda.set_device(env.local_rank % torch.cuda.device_count())
    if env.world_size == 1:
        return env
    os.environ.update(network.choose_variables(env.master_addr, env.num_nodes))
    store, run_id = rendezvous(env, device(), backend, join_timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device() if backend == "nccl" else None,
    )
    if not env.agent_store:  # rank 0 serves the store, and must not leave while others join
        barrier()
    return dataclasses.replace(env, run_id=run_id)


def _choose_backend(asked: str | None, env: Environment) -> str:
    cuda = torch.cuda.is_available()
    chosen = asked if asked not in (None, "auto") else env.backend or ("nccl" if cuda else "gloo")
    if chosen not in ("nccl", "gloo"):
        raise ValueError(f"backend {chosen!r} is unknown; use nccl, gloo or auto")
    if chosen == "nccl" and not cuda:
        raise ValueError(f"backend nccl needs a GPU and {socket.gethostname()} has none; use gloo")
    return chosen


def device() -> torch.device:
    """Return the device of this process: its GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_main_process() -> bool:
    """Return whether this is global rank 0."""
    return dist.get_rank() == 0 if dist.is_initialized() else detect().is_main


def barrier() -> None:
    """Wait for every rank; do nothing when alone."""
    if dist.is_initialized():
        dist.barrier()


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch, its GPUs, Python and NumPy (if it is imported), differently for each rank.

    Call it without a rank before the model is created, for the same weights on every rank.
    """
    own_seed = (seed + 1_000_003 * rank) % 2**32
    torch.manual_seed(own_seed)
    random.seed(own_seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own_seed)


def setup_distributed_models(
    *models: nn.Module | None,
    strategy: str = "auto",
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    bucket_cap_mb: float | None = None,
    sharding: Sharding | None = None,
) -> Any:
    """Move models to this process's device and wrap them; every rank gets rank 0's weights.

    A model without a trainable parameter is not wrapped; None stays None.

    Args:
        strategy: "ddp": one process per GPU; "fsdp": the same, and each holds a part of the model;
            "dp": one process, all its GPUs; "single": neither; "auto": ddp if there are several
            processes.
        find_unused_parameters: for a model that skips parameters in some steps. It is DDP's own,
            as are `static_graph` and `bucket_cap_mb`.
        sharding: how fsdp shards the model.

    Returns a model for one, a tuple for several. Raises ValueError for a strategy that is unknown
    or does not fit.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    check_strategy(strategy, world_size)

    def wrap(model: nn.Module) -> nn.Module:
        is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
        if strategy == "fsdp" and world_size > 1 and not is_frozen:
            from . import fsdp

            return fsdp.shard(model, [*blocks(model)], device(), sharding or Sharding())
        model = model.to(device())
        if world_size > 1 and is_frozen:  # which DDP refuses
            take_first_ranks(model)
        elif world_size > 1:
            return DistributedDataParallel(
                model,
                device_ids=[device()] if device().type == "cuda" else None,
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                bucket_cap_mb=bucket_cap_mb,
                gradient_as_bucket_view=True,  # saves a copy of the gradients
            )
        elif strategy == "dp" and torch.cuda.device_count() > 1 and not is_frozen:
            return DataParallel(model)
        return model

    wrapped = tuple(None if model is None else wrap(model) for model in models)
    return wrapped[0] if len(wrapped) == 1 else wrapped


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module without its wrapper."""
    return model.module if isinstance(model, DistributedDataParallel | DataParallel) else model


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the repeated parts of a model: what its outermost ModuleLists hold."""
    for child in model.children():
        yield from child if isinstance(child, nn.ModuleList) else blocks(child)


def is_sharded(model: nn.Module) -> bool:
    """Return whether each rank holds a part of the model, and all must compute with it together."""
    return hasattr(model, "set_requires_gradient_sync")  # of FSDPModule


@contextlib.contextmanager
def no_sync(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Do not exchange gradients in the body; the next backward pass exchanges their sum."""
    with contextlib.ExitStack() as stack:
        if enabled and isinstance(model, DistributedDataParallel):
            stack.enter_context(model.no_sync())
        elif enabled and is_sharded(model):
            sharded: Any = model
            sharded.set_requires_gradient_sync(False)
            stack.callback(sharded.set_requires_gradient_sync, True)
        yield


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
    """Return a loader over this rank's share of a dataset, `batch_size` samples per process.

    All ranks get the same number of samples. Unless `drop_last`, some samples repeat for that. Call
    `loader.sampler.set_epoch(n)` for another order in each epoch. World size and rank are the
    process group's; `options` are DataLoader's own, such as `collate_fn`. Raises ValueError for a
    dataset without a length, which cannot be sharded.
    """
    if isinstance(dataset, IterableDataset):
        cause = f"{type(dataset).__name__} is an IterableDataset, which has no samples to share out"
        cure = "let its __iter__ skip those of other ranks, and give it to DataLoader"
        raise ValueError(f"{cause}; {cure}")
    if not dist.is_initialized():
        world_size, rank = world_size or 1, rank or 0
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    options.setdefault("persistent_workers", options.get("num_workers", 0) > 0)
    return DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last, **options)


def sync_metrics(
    values: Mapping[str, float | Tensor], world_size: int | None = None, *, weight: float = 1.0
) -> dict[str, float]:
    """Return each value's weighted mean over the ranks, with one all-reduce in float64.

    Every rank passes the same names and gets the same numbers. `weight` is what this rank's values
    count, such as its samples. Values of weight 0 are ignored; if all weights are 0, means are NaN.
    Raises ValueError for a world size other than the process group's.
    """
    there = dist.get_world_size() if dist.is_initialized() else 1
    if world_size not in (None, there):
        raise ValueError(f"world_size is {world_size}, but {there} ranks have joined; omit it")
    own = {
        name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()
    }
    if not dist.is_initialized():
        return own
    names = sorted(own)
    parts = [own[name] * weight if weight else 0.0 for name in names]
    sums = torch.tensor([*parts, weight], dtype=torch.float64, device=device())
    with freed(sums):
        dist.all_reduce(sums)
    means = dict(zip(names, (sums[:-1] / sums[-1]).tolist(), strict=True))
    return {name: means[name] for name in own}


def cleanup_distributed() -> None:
    """Leave the process group, if there is one. A program that ends with `finish` need not."""
    if dist.is_initialized():
        dist.destroy_process_group()
