"""FSDP2: parameters, gradients and the optimizer's state are sharded over the ranks.

Each rank holds a shard of every parameter, and gathers a block's parameters when it computes with
them (Zhao et al. 2023; torch.distributed.fsdp.fully_shard). Every rank must run the same forward
passes. The import takes 0.7 s, so import this module only to shard a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .collectives import take_first_ranks
from .environment import LauncherError, detect
from .strategy import Sharding, check_strategy
from .torch_internals import (
    import_dtensor,
    import_fsdp,
    set_time_limit,
    tree_map_only,
)

fsdp2, dtensor = import_fsdp(), import_dtensor()


def shard(
    model: nn.Module, blocks: Sequence[nn.Module], device: torch.device, how: Sharding
) -> nn.Module:
    """Shard a model, block by block, with rank 0's weights.

    If each group of ranks shards separately, the groups hold replicas (HSDP). Raises LauncherError
    if the ranks cannot form groups of `how.shard`, or if this torch cannot shard on a CPU.
    """
    is_cpu = device.type == "cpu"
    if is_cpu and not hasattr(fsdp2.FSDPModule, "set_force_sum_reduction_for_comms"):
        cause = f"with torch {torch.__version__}, strategy fsdp needs GPUs"
        raise LauncherError(f"{cause}; install torch 2.8 or newer, or use ddp", "env-missing")
    if how.cpu_offload and dist.get_backend() == "nccl":
        cause = "fsdp.cpu_offload needs collectives on the CPU, which NCCL does not have"
        raise LauncherError(f"{cause}; set it to false, or use the gloo backend")
    mesh = _mesh(device, how.shard)
    set_time_limit(mesh.get_all_groups())
    dtype = getattr(torch, how.dtype) if how.dtype else None
    policy = fsdp2.MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)
    offload = fsdp2.CPUOffloadPolicy() if how.cpu_offload else fsdp2.OffloadPolicy()
    for module in (*blocks, model):
        module.to(device)
        take_first_ranks(module)
        fsdp2.fully_shard(
            module,
            mesh=mesh,
            # The root's parameters are needed again at once: the backward pass begins there.
            reshard_after_forward=how.reshard_after_forward and module is not model,
            mp_policy=policy,
            offload_policy=offload,
        )
        if is_cpu:  # sum first, then divide: an older gloo cannot average
            summing: Any = module
            summing.set_force_sum_reduction_for_comms(True)
    return model


def _mesh(device: torch.device, size: str | int) -> DeviceMesh:
    ranks = dist.get_world_size()
    each = {"all": ranks, "node": detect().local_world_size}.get(str(size)) or int(size)
    check_strategy("fsdp", ranks, each)
    if each == ranks:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    names = ("replicate", "shard")
    return init_device_mesh(device.type, (ranks // each, each), mesh_dim_names=names)


def gather(state: Any) -> Any:
    """Return a state_dict() with full tensors on rank 0's CPU, and empty ones elsewhere.

    All ranks must call this.
    """
    keep = Tensor.cpu if dist.get_rank() == 0 else lambda whole: whole.new_empty(0)
    return tree_map_only(dtensor.DTensor, lambda tensor: keep(tensor.full_tensor()), state)


def scatter(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's full state_dict() with its tensors replaced by this rank's shards.

    Meta tensors become shards on the meta device, whose content can then be read.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    parts = {
        index: {name: _part(value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": parts}


def scatter_weights(weights: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Do the same as `scatter` for a model's full state_dict()."""
    own = model.state_dict()
    return {name: _part(value, own.get(name)) for name, value in weights.items()}


def _part(value: Any, like: Any) -> Any:
    is_sharded = isinstance(like, dtensor.DTensor) and isinstance(value, Tensor)
    if not is_sharded or not value.dim():
        return value
    whole = value if value.is_meta else value.to(like.device)
    return dtensor.distribute_tensor(whole, like.device_mesh, like.placements)
