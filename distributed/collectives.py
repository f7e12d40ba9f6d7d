"""Exchange bytes, tensors and values between ranks, and copy rank 0's weights to all ranks."""

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

from .torch_internals import time_limit


def own_rank() -> int:
    """Return this process's rank in the process group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def count_ranks() -> int:
    """Return how many ranks have joined; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gloo_group() -> dist.ProcessGroup:
    """Return a new group of all ranks, with gloo: its limit is at least the default group's."""
    limit = max(time_limit(), dist.default_pg_timeout)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=limit)
    return group


def barrier() -> None:
    """Wait for every rank; do nothing without a process group."""
    if dist.is_initialized():
        dist.barrier()


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return every rank's bytes, in order of rank, on every rank; `group` contains all ranks.

    torch's own all_gather_object would unpickle what other ranks send.
    """
    if not dist.is_initialized():
        return [data]
    mine = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[:-1]
    return [to_bytes(one.cpu()) for one in _gather(mine.to(_device(group)), group)]


def gather_json(value: Any) -> list[Any]:
    """Return every rank's JSON value, in order of rank, on every rank."""
    return [json.loads(one) for one in gather_bytes(json.dumps(value).encode())]


def _gather(mine: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return every rank's bytes as one-dimensional tensors, in order of rank."""
    sizes = torch.zeros(count_ranks(), dtype=torch.int64, device=mine.device)
    sizes[own_rank()] = len(mine)
    with freed(sizes):
        dist.all_reduce(sizes, group=group)
    padded = mine.new_zeros(int(sizes.max()) + 1)
    padded[: len(mine)] = mine
    everyone = [torch.empty_like(padded) for _ in sizes]
    with freed(padded, *everyone):
        dist.all_gather(everyone, padded, group=group)
    return [one[:size] for one, size in zip(everyone, sizes.tolist(), strict=True)]


def gather(tensor: Tensor) -> Tensor:
    """Return the rows of every rank's tensor, in order of rank, on every rank, without padding.

    Each rank may have any number of rows, or none. A tensor without dimensions is one row.
    The result has no gradient. Raises ValueError on every rank if rows differ in shape or dtype.
    """
    mine = tensor.detach() if tensor.dim() else tensor.detach().view(1)
    told = gather_json([[*mine.shape], str(mine.dtype)[6:]])
    kinds = [[shape[1:], dtype] for shape, dtype in told if shape[0]]
    if not kinds or not dist.is_initialized():
        return mine
    for one in kinds:
        if one != kinds[0]:
            cause = f"rows differ between ranks ({kinds[0]} and {one})"
            raise ValueError(f"gather: {cause}; make their shape and dtype match")
    shape, dtype = kinds[0]
    own = mine.to(_device()).contiguous().view(-1).view(torch.uint8)
    whole: Tensor = torch.cat(_gather(own)).view(getattr(torch, dtype)).view([-1, *shape])
    return whole.to(tensor.device)


def broadcast(value: Any) -> Any:
    """Return rank 0's value on every rank: a tensor, or any JSON value.

    The tensor has no gradient. It is on this process's GPU if rank 0's tensor is on a GPU,
    otherwise on the CPU.
    """
    is_tensor = isinstance(value, Tensor)
    mine = [[*value.shape], str(value.dtype)[6:], value.device.type] if is_tensor else value
    is_tensor, told = gather_json([is_tensor, mine] if own_rank() == 0 else None)[0]
    if not is_tensor:
        return told
    shape, dtype, kind = told
    tensor = value.detach() if own_rank() == 0 else torch.empty(shape, dtype=getattr(torch, dtype))
    if dist.is_initialized() and tensor.numel():
        tensor = tensor.to(_device()).contiguous()
        content = tensor.view(-1).view(torch.uint8)  # not a copy
        with freed(content):
            dist.broadcast(content, 0)
    return tensor.to(kind)


def mean(tensor: Tensor) -> Tensor:
    """Return the mean over the ranks of tensors of equal shape, on every rank, without a gradient.

    The mean is float32 if the tensors have an integer type or a smaller floating-point type.
    """
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    where = _device() if dist.is_initialized() else tensor.device
    sums = tensor.detach().to(where, dtype, copy=True).contiguous()
    if dist.is_initialized():
        with freed(sums):
            dist.all_reduce(sums)
    return (sums / count_ranks()).to(tensor.device)


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """Run the body on rank 0 first, then on all other ranks at the same time.

    If the body raises on rank 0, the other ranks skip it and raise a RuntimeError.
    """
    if own_rank() == 0:
        is_done = False
        try:
            yield
            is_done = True
        finally:
            gather_json(is_done)
    elif gather_json(None)[0]:
        yield
    else:
        raise RuntimeError("rank 0 failed in main_first(); its message says why")


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
    """Run a collective in the body, then wait until gloo's thread has released its tensors.

    The thread takes the GIL to do so, which would abort a program that is about to exit.
    """
    before = [*map(sys.getrefcount, tensors)]
    yield
    limit = time.monotonic() + (0.1 if tensors[0].is_cpu else 0)
    while [*map(sys.getrefcount, tensors)] != before and time.monotonic() < limit:
        time.sleep(0.0001)
