"""What a training script needs to run unchanged in one process or in many.

    env = init_distributed()                            # join the other ranks, if there are any
    seed_everything(42, env.rank)
    model = setup_distributed_models(model)             # on the device, wrapped in DDP
    loader = get_dataloader_for_distributed(dataset, batch_size=32, shuffle=True)
    metrics = sync_metrics({"loss": loss}, weight=samples)

With mixed precision, gradient accumulation, and a run that resumes after a stop:

    with no_sync(model, enabled=not is_last), autocast("bfloat16"):
        loss = loss_of(model, batch)
    norm = clip_gradients(model, 1.0)
    save(folder, step, model, optimizer, epoch=epoch)
    progress = load(folder, model, optimizer)           # None in a new run
    finish()

Needs only torch; the process group is torch's own.
"""

from __future__ import annotations

import atexit
import dataclasses
import math
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from . import network
from .checkpoint.one_call import complete, load, save
from .collectives import (
    add_up,
    barrier,
    broadcast,
    count_ranks,
    gather,
    gather_bytes,
    gather_json,
    has_group,
    main_first,
    mean,
)
from .environment import BACKENDS, Environment, check_run_id, detect, refuse_others
from .errors import STOPPED
from .exit import finish as end_process
from .heartbeat import beat
from .loader import get_dataloader_for_distributed, seed_everything
from .models import (
    autocast,
    blocks,
    clip_gradients,
    device,
    grad_scaler,
    is_sharded,
    no_sync,
    setup_distributed_models,
    unwrap,
)
from .rendezvous import rendezvous
from .stop import Stop
from .strategy import Sharding
from .torch_internals import default_store, keep_groups, skip_worker_joins

__all__ = (
    "STOPPED",
    "Environment",
    "Sharding",
    "Stop",
    "autocast",
    "barrier",
    "beat",
    "blocks",
    "broadcast",
    "cleanup_distributed",
    "clip_gradients",
    "device",
    "finish",
    "gather",
    "gather_bytes",
    "gather_json",
    "get_dataloader_for_distributed",
    "grad_scaler",
    "init_distributed",
    "is_main_process",
    "is_sharded",
    "load",
    "main_first",
    "mean",
    "no_sync",
    "print_main",
    "save",
    "seed_everything",
    "setup_distributed_models",
    "sync_metrics",
    "unwrap",
)


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
        backend: "nccl" or "gloo"; None or "auto": $BACKEND, otherwise nccl with GPUs, gloo without.
        join_timeout_s: limit for all ranks to join.
        timeout_s: limit for one collective.
        local_rank: the --local-rank argument of torch.distributed.launch.
        nodes, ranks_per_node: expected numbers; raises LauncherError if they differ.

    Returns this process's environment, with rank 0's run id; later calls return the same.
    Raises LauncherError if variables, ranks or GPUs contradict each other, TimeoutError naming the
    ranks that did not join, and ValueError for nccl without a GPU.
    """
    env = detect(local_rank=local_rank)
    refuse_others(
        f"{env.launcher} started",
        ("--nodes", nodes, env.num_nodes),
        ("--gpus-per-node", ranks_per_node, env.local_world_size),
    )

    backend = _choose_backend(backend, env)
    if torch.cuda.is_available():
        # Some launchers expose all GPUs of the node to each rank, others only its own.
        torch.cuda.set_device(env.local_rank % torch.cuda.device_count())

    if env.world_size == 1:
        return env
    if not dist.is_initialized():
        _join(env, backend, join_timeout_s, timedelta(seconds=timeout_s))
    return dataclasses.replace(env, run_id=_shared_run_id(env))


def _join(env: Environment, backend: str, join_timeout_s: float, timeout: timedelta) -> None:
    os.environ.update(network.choose_variables(env.master_addr, env.num_nodes, os.environ))
    # With host ids of their own, ranks may share a GPU.
    owns_gpu = backend == "nccl" and "NCCL_HOSTID" not in os.environ
    store = rendezvous(env, device(), owns_gpu, join_timeout_s)
    store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timeout,
        device_id=device() if backend == "nccl" else None,
    )
    has_group()  # notes which process has joined


@cache
def _shared_run_id(env: Environment) -> str:
    """Return rank 0's run id, and ask only once: later, rank 0 and its store may be gone."""
    if env.agent_store and env.is_named:  # do not ask the store: it has no password
        return env.run_id
    if env.rank == 0:
        default_store().set("run_id", env.run_id)
    run_id = check_run_id(default_store().get("run_id").decode())
    barrier()
    return run_id


def _choose_backend(asked: str | None, env: Environment) -> str:
    cuda = torch.cuda.is_available()
    chosen = asked if asked not in (None, "auto") else env.backend or ("nccl" if cuda else "gloo")
    if chosen not in BACKENDS:
        raise ValueError(f"backend {chosen!r} is unknown; use nccl, gloo or auto")
    if chosen == "nccl" and not cuda:
        raise ValueError(f"backend nccl needs a GPU but {socket.gethostname()} has none; use gloo")
    return chosen


def is_main_process() -> bool:
    """Return whether this is global rank 0."""
    return (dist.get_rank() if dist.is_initialized() else detect().rank) == 0


def print_main(*values: object, **options: Any) -> None:
    """Print on global rank 0 only, and flush; `options` are print's own."""
    if is_main_process():
        print(*values, **{"flush": True, **options})


def sync_metrics(
    values: Mapping[str, float | Tensor], world_size: int | None = None, *, weight: float = 1.0
) -> dict[str, float]:
    """Return each value's weighted mean over the ranks, with one all-reduce in float64.

    Every rank passes the same names and gets the same numbers. `weight` is the weight of
    this rank's values, such as its number of samples; 0 ignores them. If all weights are 0, the
    means are NaN. Raises TypeError for a value that is no number, ValueError for a world size other
    than the process group's and, on every rank, for names that differ.
    """
    refuse_others("this run's is", ("world_size", world_size, count_ranks()))
    own = {name: _to_number(name, value) for name, value in values.items()}
    if not dist.is_initialized():
        return own

    names = sorted(own)
    parts = [own[name] * weight if weight else 0.0 for name in names]
    *sums, total = add_up([*parts, weight], "sync_metrics", *names)
    sum_of = dict(zip(names, sums, strict=True))
    return {name: sum_of[name] / (total or math.nan) for name in own}


def _to_number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        cause = f"sync_metrics: {name} is {value!r:.60}"
        raise TypeError(f"{cause}; pass a number, or a tensor with one element") from None


def cleanup_distributed() -> None:
    """Destroy the process group, if there is one. Not needed before `finish`."""
    if dist.is_initialized():
        dist.destroy_process_group()


def finish(code: int = 0) -> NoReturn:
    """Exit this process quickly. All ranks should call this last, instead of sys.exit.

    Waits for a `save` in progress (on all ranks if the code is 0 or STOPPED). Then it raises
    SystemExit, so that everything ends as after sys.exit: `with` and `finally`, threads and exit
    handlers (for at most 30 s), and the script's objects. Only torch is not torn down, which would
    take 0.6 s.
    """
    atexit.unregister(finish)  # finish may itself be an exit handler
    complete(code)
    skip_worker_joins()
    keep_groups()
    end_process(code)
