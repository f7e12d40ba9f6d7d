"""Every undocumented torch name that the helper uses, and what we do in a version that lacks it.

Only this file and launcher/agent/torch_internals.py use such names, so a torch that drops one
breaks only these two. Unless a comment says otherwise, every torch from 2.4 to 2.15 has all of
them.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.utils._pytree import tree_map_only

__all__ = "default_store", "tree_map_only"

COMPILED = "_orig_mod"  # the child of torch.compile's wrapper: the module that is compiled

# --- the process groups ---------------------------------------------------------------------------


def time_limit() -> timedelta:
    """Return the default process group's time limit for a collective."""
    return default_store().timeout  # type: ignore[attr-defined,no-any-return]


def set_time_limit(groups: Iterable[Any]) -> None:
    """Give other process groups the same limit; otherwise, NCCL's is 10 minutes."""
    for group in groups:
        distributed_c10d._set_pg_timeout(time_limit(), group)


def device_of(group: Any = None) -> str:
    """Return the type of device on which a process group exchanges tensors: the CPU if it can.

    By default, this is the group of all ranks. get_backend() does not tell: it is "undefined" if
    the script has chosen none (torch 2.6 and newer), and "cuda:nccl" if it has named the device.
    """
    types = (group or distributed_c10d._get_default_group())._device_types
    return "cpu" if torch.device("cpu") in types else "cuda"


_kept = list[Any]()


def keep_groups() -> None:
    """Keep all process groups until the process exits, also those of models if destroyed.

    The end of one joins gloo's thread, with the GIL held if a model has the last reference. The
    thread may need the GIL for the last tensor that it reduced: a deadlock.
    """
    models = [one for one in gc.get_objects() if type(one) is nn.parallel.DistributedDataParallel]
    _kept[:] = [*distributed_c10d._world.pg_map, *(one.process_group for one in models)]


# --- tensors and models -------------------------------------------------------------------------


def references(tensor: Tensor) -> int:
    """Return how often a tensor is in use, also by torch's own threads."""
    return tensor._use_count()  # type: ignore[attr-defined,no-any-return]


@contextlib.contextmanager
def held_by_gloo(*tensors: Tensor) -> Iterator[None]:
    """Run a collective in the body, then wait until gloo's thread has released its tensors.

    Waits 0.1 s at most, on a CPU only. If Python has deleted a tensor, the thread needs the GIL to
    release it: an exiting program would abort, a data worker forked then may hang (Python 3.10).
    """
    before = [*map(references, tensors)]
    yield
    deadline = time.monotonic() + (0.1 if tensors[0].is_cpu else 0)
    while [*map(references, tensors)] != before and time.monotonic() < deadline:
        time.sleep(0.0001)


def skip_worker_joins() -> None:
    """Do not wait 5 s for each worker of a loader that pins memory; newer torch does not."""
    kind = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    if hasattr(kind, "_clean_up_worker"):
        atexit.unregister(kind._clean_up_worker)


def copy_each(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Copy each tensor into its counterpart, in one call."""
    torch._foreach_copy_([*ours], [*theirs])


def compile_beside_ddp() -> None:
    """Keep torch.compile from splitting graphs at the boundaries of DDP's buckets."""
    torch._dynamo.config.optimize_ddp = False


def import_fsdp() -> types.ModuleType:
    """Import FSDP2, which was in another module before torch 2.6. The import takes 0.7 s."""
    return _module_with(
        "fully_shard", "torch.distributed.fsdp", "torch.distributed._composable.fsdp"
    )


def import_dtensor() -> types.ModuleType:
    """Import DTensor, which was in another module before torch 2.5."""
    return _module_with("DTensor", "torch.distributed.tensor", "torch.distributed._tensor")


def _module_with(name: str, now: str, before: str) -> types.ModuleType:
    module = importlib.import_module(now)
    return module if hasattr(module, name) else importlib.import_module(before)
