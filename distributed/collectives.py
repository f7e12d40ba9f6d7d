"""How ranks send each other bytes, and rank 0's tensors to all."""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return every rank's bytes, by rank, on every rank; `group` is one of all ranks.

    torch's own all_gather_object would unpickle what the others send.
    """
    if not dist.is_initialized():
        return [data]
    where = _device(group)
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=where)
    sizes[dist.get_rank()] = len(data)
    with freed(sizes):
        dist.all_reduce(sizes, group=group)
    mine = torch.frombuffer(bytearray(data.ljust(int(sizes.max()) + 1)), dtype=torch.uint8)
    mine = mine.to(where)
    everyone = [torch.empty_like(mine) for _ in sizes]
    with freed(mine, *everyone):
        dist.all_gather(everyone, mine, group=group)
    return [to_bytes(one.cpu())[:size] for one, size in zip(everyone, sizes.tolist(), strict=True)]


def gather_json(value: Any) -> list[Any]:
    """Return every rank's value, of types that JSON has, by rank, on every rank."""
    return [json.loads(one) for one in gather_bytes(json.dumps(value).encode())]


def broadcast_bytes(data: bytes | None, size: int) -> bytes:
    """Return rank 0's bytes on every rank; the other ranks know their number alone."""
    tensor = torch.frombuffer(bytearray(data or size), dtype=torch.uint8).to(_device())
    dist.broadcast(tensor, 0)
    return data or to_bytes(tensor.cpu())


def _device(group: dist.ProcessGroup | None = None) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def to_bytes(tensor: Tensor) -> bytes:
    """Return a copy of a contiguous CPU tensor's memory, without NumPy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def take_first_ranks(module: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks, except those that are sharded."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not hasattr(tensor, "full_tensor"):
            data = tensor.data
            with freed(data):
                dist.broadcast(data, src=0)


@contextlib.contextmanager
def freed(*tensors: Tensor) -> Iterator[None]:
    """Do a collective in the body, and wait until gloo's thread has let go of its tensors.

    The thread takes the GIL for that, and aborts a program that is about to end.
    """
    before = [sys.getrefcount(tensor) for tensor in tensors]
    yield
    limit = time.monotonic() + (0.1 if tensors[0].is_cpu else 0)
    while [sys.getrefcount(tensor) for tensor in tensors] != before and time.monotonic() < limit:
        time.sleep(0.0001)
