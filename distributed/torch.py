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

Needs only torch; the process group is torch's own. Where each step happens:

    which rank    environment.py: from the variables of torchrun, an MPI or SLURM. Under SLURM, the
                  first host of the step is the master address, unless MASTER_ADDR is set.
    join          rendezvous.py: the ranks meet at the master's port, then form the process group.
    seed, data    loader.py: each rank seeds with its own number, and reads its share of the data.
    model         models.py: torch's DistributedDataParallel, or FSDP2, around it.
    save, load    checkpoint/one_call.py: rank 0 writes; of a sharded model, each rank its part.
    finish        exit.py: as sys.exit, after the last save, but without tearing down torch.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import collectives
from .collectives import (
    barrier,
    broadcast,
    gather,
    gather_bytes,
    gather_json,
    main_first,
    mean,
    record_join,
)
from .environment import BACKENDS, Environment, check_numbers, detect
from .errors import STOPPED, as_number
from .exit import before_finish, finish
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
from .stop import Stop
from .strategy import Sharding
from .torch_internals import keep_groups, skip_worker_joins

if TYPE_CHECKING:  # see __getattr__ below
    from .checkpoint.one_call import load, save

_SAVES_AND_LOADS = ".checkpoint.one_call"  # and what it imports: nearly half of the code

# fmt: off
__all__ = (
    "STOPPED", "Environment", "Sharding", "Stop", "autocast", "barrier", "beat", "blocks",
    "broadcast", "cleanup_distributed", "clip_gradients", "device", "finish", "gather",
    "gather_bytes", "gather_json", "get_dataloader_for_distributed", "grad_scaler",
    "init_distributed", "is_main_process", "is_sharded", "load", "main_first", "mean", "no_sync",
    "print_main", "save", "seed_everything", "setup_distributed_models", "sync_metrics", "unwrap",
)
# fmt: on


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

    All ranks must call this. With GPUs, it sets torch's current device. Before it joins, it sets
    network variables of gloo and NCCL in the environment, except those that the user has set.

    Args:
        backend: "nccl" or "gloo"; None or "auto": $BACKEND if it is one of them, otherwise nccl
            with GPUs, gloo without.
        join_timeout_s: limit for all ranks to join, in seconds.
        timeout_s: limit for one collective, in seconds.
        local_rank: the --local-rank argument of torch.distributed.launch.
        nodes, ranks_per_node: expected numbers; raises LauncherError if they differ.

    Returns this process's environment, with rank 0's run id; later calls return the same.
    Raises LauncherError if variables, ranks or GPUs contradict each other; TimeoutError, which
    names the ranks that did not join; ConnectionError if rank 0 is lost while the ranks join;
    OSError if rank 0's port is in use; and ValueError for nccl without a GPU, an unknown backend or
    NCCL_PROFILE, or a SLURM node list that cannot be read.
    """
    env = detect(local_rank=local_rank)  # from the variables of torchrun, MPI or SLURM
    check_numbers(
        f"{env.launcher} started",
        ("nodes", nodes, env.num_nodes),
        ("ranks_per_node", ranks_per_node, env.local_world_size),
    )

    backend = _choose_backend(backend, env)
    if torch.cuda.is_available():
        # Some launchers expose all GPUs of the node to each rank, others only its own.
        torch.cuda.set_device(env.local_rank % torch.cuda.device_count())

    # Import now: by the first save, our files may have been updated, or a handler may call it.
    import_module(_SAVES_AND_LOADS, __package__)

    if env.world_size == 1:
        return env
    from .rendezvous import join_ranks

    return join_ranks(env, device(), backend, join_timeout_s=join_timeout_s, timeout_s=timeout_s)


def _choose_backend(asked: str | None, env: Environment) -> str:
    """Return "nccl" or "gloo"; raises ValueError for any other, or for nccl without a GPU."""
    cuda = torch.cuda.is_available()
    chosen = asked if asked not in (None, "auto") else env.backend or ("nccl" if cuda else "gloo")
    if chosen not in BACKENDS:
        raise ValueError(f"backend {chosen!r} is unknown; use nccl, gloo or auto")
    if chosen == "nccl" and not cuda:
        raise ValueError(f"backend nccl needs a GPU but {socket.gethostname()} has none; use gloo")
    return chosen


def is_main_process() -> bool:
    """Return whether this is global rank 0; before the ranks join, by the launcher's variables."""
    return (dist.get_rank() if dist.is_initialized() else detect().rank) == 0


def print_main(*values: object, **options: Any) -> None:
    """Print on global rank 0 only, and flush; `options` are print's own."""
    if is_main_process():
        print(*values, **{"flush": True, **options})


def sync_metrics(
    values: Mapping[str, float | Tensor], world_size: int | None = None, *, weight: float = 1.0
) -> dict[str, float]:
    """Return each value's weighted mean over the ranks, computed in float64.

    A value is a number, or a tensor with one element. Every rank passes the same names and gets the
    same numbers; up to 59 names need one all-reduce. `weight` is the weight of this rank's values,
    such as its number of samples; 0 ignores them. If all weights are 0, the means are NaN. All this
    also holds for a single process without a process group.

    Raises TypeError for a value that is no number, ValueError for a world size other than the
    process group's and, on every rank, for names that differ.
    """
    check_numbers("this run's is", ("world_size", world_size, collectives.count_ranks()))
    own = {name: as_number(f"sync_metrics: {name}", value) for name, value in values.items()}
    if not dist.is_initialized():
        return own if weight else dict.fromkeys(own, math.nan)

    names = sorted(own)
    parts = [own[name] * weight if weight else 0.0 for name in names]
    *sums, total = collectives.add_up([*parts, weight], "sync_metrics", *names)
    sum_of = dict(zip(names, sums, strict=True))
    return {name: sum_of[name] / (total or math.nan) for name in own}


def cleanup_distributed() -> None:
    """Destroy the process group, if there is one. Not needed before `finish`.

    Afterwards, `barrier` does nothing in this rank, and other exchanges raise LauncherError.
    """
    if dist.is_initialized():
        record_join()  # perhaps the script itself has joined
        dist.destroy_process_group()


def _leave_torch_as_it_is(_code: int) -> None:
    """Skip what torch would tear down at the exit; see `finish`."""
    skip_worker_joins()
    keep_groups()


before_finish.append(_leave_torch_as_it_is)

if not TYPE_CHECKING:  # otherwise, it would let every misspelt name pass

    def __getattr__(name: str) -> Any:
        """Import `save` and `load` when they are first used."""
        if name not in ("load", "save"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_SAVES_AND_LOADS, __package__), name)
