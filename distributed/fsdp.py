"""FSDP2: parameters, gradients and the optimizer's state are sharded over the ranks.

Each rank holds a shard of every parameter, and gathers a block's parameters when it computes with
them (Zhao et al. 2023; torch.distributed.fsdp.fully_shard). Every rank must run the same forward
passes. The import takes 0.7 s, so import this module only to shard a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .collectives import broadcast_weights
from .environment import LauncherError, detect
from .strategy import Sharding, check_strategy
from .torch_internals import device_of, import_fsdp, set_time_limit

fsdp2 = import_fsdp()


def shard(
    model: nn.Module, blocks: Sequence[nn.Module], device: torch.device, how: Sharding
) -> None:
    """Shard a model in place, block by block, with rank 0's weights.

    All ranks must call this. If each group of ranks shards separately, the groups hold replicas
    (HSDP). Raises LauncherError if the ranks cannot form groups of `how.shard`, if this torch
    cannot shard on a CPU, or if parameters are to be offloaded but NCCL is the only backend.
    """
    is_cpu = device.type == "cpu"
    if is_cpu and not hasattr(fsdp2.FSDPModule, "set_force_sum_reduction_for_comms"):
        raise LauncherError(
            f"with torch {torch.__version__}, strategy fsdp needs GPUs; "
            "install torch 2.8 or newer, or use ddp",
            "env-missing",
        )
    if how.cpu_offload and device_of() == "cuda":
        raise LauncherError(
            "fsdp.cpu_offload needs collectives on the CPU, which NCCL does not have; "
            "set it to false, or use the gloo backend"
        )

    mesh = _mesh(device, how.shard)
    set_time_limit(mesh.get_all_groups())
    dtype = getattr(torch, how.dtype) if how.dtype else None
    # Blocks compute in `dtype`; gradients are summed over the ranks in float32.
    policy = fsdp2.MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)
    offload = fsdp2.CPUOffloadPolicy() if how.cpu_offload else fsdp2.OffloadPolicy()

    # One block is moved at a time, so the whole model need not fit on one GPU. The root comes last:
    # fully_shard skips what is sharded already.
    for module in *blocks, model:
        module.to(device)
        broadcast_weights(module)
        fsdp2.fully_shard(
            module,
            mesh=mesh,
            # The root's parameters are needed again at once: the backward pass begins there.
            reshard_after_forward=how.reshard_after_forward and module is not model,
            mp_policy=policy,
            offload_policy=offload,
        )
        if is_cpu:  # sum first, then divide: an older gloo cannot average
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]


def _mesh(device: torch.device, size: str | int) -> DeviceMesh:
    """Return the mesh of ranks: groups of `size` consecutive ranks (a number, "all" or "node").

    All ranks must call this. Raises LauncherError if the groups would not be equal in size.
    """
    ranks = dist.get_world_size()
    if size == "all":
        size = ranks
    elif size == "node":
        size = detect().local_world_size

    in_group = int(size)
    check_strategy("fsdp", ranks, in_group)
    if in_group == ranks:
        return init_device_mesh(device.type, (ranks,))
    return init_device_mesh(
        device.type, (ranks // in_group, in_group), mesh_dim_names=("replicate", "shard")
    )
