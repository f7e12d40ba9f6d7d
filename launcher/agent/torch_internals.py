"""Every undocumented torch name that only the node agent and its forks use.

See distributed/torch_internals.py, which has those that a training script needs.
"""

import importlib.util
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from torch._C import _distributed_c10d
from torch.cuda import _is_in_bad_fork as is_lost_by_fork
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]

__all__ = ("is_lost_by_fork",)

# --- the store and the process groups -----------------------------------------------------------


def serve_store(address: str, port: int, listener: int) -> TCPStore:
    """Serve torch's store on a socket that is already listening, so no one else can take the port.

    The store takes over the descriptor `listener`. Before torch 2.8, the libuv store cannot do
    this; the classic one can, with the same protocol.
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


def rendezvous_backends() -> set[str]:
    """Return the names that torchrun's --rdzv-backend accepts, also those of installed packages."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    return {*rendezvous_handler_registry._registry}


def group_backends() -> list[Any]:
    """Return the backends of all process groups of this process.

    They are returned in place of the groups because torch releases the GIL when Python drops the
    last reference to a backend. For a group, it does so only from torch 2.8 on.
    """
    groups: list[Any] = [*distributed_c10d._world.pg_map]
    return [one._get_backend(device) for one in groups for device in one._device_types]


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


def load_dynamo() -> None:
    """Import what an optimizer or DistributedDataParallel imports when it is first used."""
    importlib.import_module("torch._dynamo")
