"""Every undocumented torch name that we use, and what we do in a version that lacks it.

No other file of ours may use such a name, so a torch that drops one breaks only this file. Unless a
comment says otherwise, every torch from 2.4 to 2.15 has all of them.
"""

from __future__ import annotations

import atexit
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch.cuda import _is_in_bad_fork as is_lost_by_fork
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ("default_store", "is_lost_by_fork", "tree_leaves", "tree_map_only")

# --- the store and the process groups -----------------------------------------------------------


def serve_store(address: str, port: int, listener: int) -> TCPStore:
    """Serve torch's store on a socket that is already listening, so no one else can take the port.

    Before torch 2.8, the libuv store cannot do this; the classic one can, with the same protocol.
    """

    serve = partial(TCPStore, address, port, is_master=True, wait_for_workers=False)
    try:
        return serve(master_listen_fd=listener, use_libuv=True)
    except NotImplementedError:
        return serve(master_listen_fd=listener, use_libuv=False)


def rendezvous_settings(text: str) -> dict[str, str]:
    """Parse the argument of torchrun's --rdzv-conf; raises ValueError if it cannot be read."""
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    return _parse_rendezvous_config(text)


def time_limit() -> timedelta:
    """Return the default process group's time limit for a collective."""
    return default_store().timeout  # type: ignore[attr-defined,no-any-return]


def set_time_limit(groups: Iterable[Any]) -> None:
    """Give other process groups the same limit; otherwise, NCCL's is 10 minutes."""
    for group in groups:
        distributed_c10d._set_pg_timeout(time_limit(), group)


def process_groups() -> list[Any]:
    """Return all process groups of this process."""
    return [*distributed_c10d._world.pg_map]


# --- the flight recorder ------------------------------------------------------------------------

# These return the recorded collectives as JSON: NCCL's from torch 2.5 on, other backends' from 2.8.
# Without them, no collective is shown.
_NAMES = "_dump_nccl_trace_json", "_dump_fr_trace_json"
recorders: list[Callable[[], str]] = [
    getattr(_distributed_c10d, name) for name in _NAMES if hasattr(_distributed_c10d, name)
]
# The variable for the number of entries to keep; 0 disables recording.
_is_general = hasattr(_distributed_c10d, _NAMES[1])
RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE" if _is_general else "TORCH_NCCL_TRACE_BUFFER_SIZE"


# --- ranks and CPUs -----------------------------------------------------------------------------


has_numa_binding = importlib.util.find_spec("torch.numa") is not None  # from torch 2.9


def cpus_near_gpu(mode: str, gpu: int) -> set[int]:
    """Return the CPUs that torchrun's --numa-binding assigns to the rank of a GPU."""
    from torch.numa import binding

    options = binding.NumaOptions(binding.AffinityMode(mode))
    return binding._get_logical_cpus_to_bind_to(gpu_index=gpu, numa_options=options)


def reports_leaks() -> bool:
    """Return whether nanobind is in use, for example by the Triton of torch 2.15.

    When a process exits, nanobind reports every object that is not freed, as after gc.freeze().
    """
    triton = sys.modules.get("triton._C.libtriton")
    return any(type(one).__module__ == "nanobind" for one in vars(triton or types).values())


# --- tensors and models -------------------------------------------------------------------------


def skip_worker_joins() -> None:
    """Do not wait 5 s for each worker of a loader that pins memory; newer torch does not."""
    kind = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    if hasattr(kind, "_clean_up_worker"):
        atexit.unregister(kind._clean_up_worker)


def copy_each(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Copy each tensor into its counterpart, in one call."""
    torch._foreach_copy_([*ours], [*theirs])


def load_dynamo() -> None:
    """Import what DistributedDataParallel imports when it is first used."""
    importlib.import_module("torch._dynamo")


def compile_beside_ddp() -> None:
    """Keep torch.compile from splitting graphs at the boundaries of DDP's buckets."""
    torch._dynamo.config.optimize_ddp = False


def compiled_module(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return what torch.compile has wrapped; None if the model is not such a wrapper."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported: nothing has been compiled
    is_wrapper = isinstance(model, getattr(dynamo, "OptimizedModule", ()))
    return model._orig_mod if is_wrapper else None  # type: ignore[return-value]


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


def can_shard_on_cpu() -> bool:
    """Return whether FSDP2 runs without a GPU, as it does from torch 2.7 on."""
    return hasattr(torch.cpu.Stream, "record_event")
