"""Exchange bytes, tensors and values between ranks, and copy rank 0's weights to all ranks."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .environment import LauncherError, detect
from .torch_internals import time_limit


def own_rank() -> int:
    """Return this process's rank in the process group; 0 without one. Raises as `has_group`."""
    return dist.get_rank() if has_group() else 0


def count_ranks() -> int:
    """Return how many ranks have joined; 1 without a process group. Raises as `has_group`."""
    return dist.get_world_size() if has_group() else 1


def has_group() -> bool:
    """Return whether this process is in a process group.

    Raises LauncherError if the launcher started several ranks and this one has never been in one.
    """
    global _may_be_alone
    if not (dist.is_initialized() or _may_be_alone or _is_alone()):
        cause = "the launcher started several ranks, and this one has not joined the others"
        cure = "call init_distributed() first; in a program that a rank starts, unset RANK"
        raise LauncherError(f"{cause}; {cure}")
    _may_be_alone = True
    return dist.is_initialized()


_may_be_alone = False  # this process was in a group, or is the only rank


def _is_alone() -> bool:
    try:
        return detect().world_size == 1 or multiprocessing.parent_process() is not None
    except ValueError:  # an incomplete environment, as in the shell of a SLURM job
        return True


def gloo_group() -> dist.ProcessGroup:
    """Return a new group of all ranks, with gloo: its limit is at least the default group's."""
    limit = max(time_limit(), dist.default_pg_timeout)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=limit)
    return group


def barrier() -> None:
    """Wait for every rank; do nothing without a process group."""
    if has_group():
        dist.barrier()


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return every rank's bytes, in order of rank, on every rank; `group` contains all ranks.

    torch's own all_gather_object would unpickle what other ranks send.
    """
    if not has_group():
        return [data]
    mine = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[:-1]
    return [to_bytes(one.cpu()) for one in _gather(mine.to(_device(group)), group)]


def gather_json(value: Any) -> list[Any]:
    """Return every rank's JSON value, in order of rank, on every rank; tuples become lists.

    Raises TypeError for a value that JSON cannot hold, or for a key that it would turn into text.
    """
    check_keys(value)
    return [json.loads(one) for one in gather_bytes(json.dumps(value).encode())]


def check_keys(value: Any) -> None:
    """Raise TypeError for a key that JSON would turn into text."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} would become text; use text, or a list of pairs")
        value = value.values()
    for one in value if not isinstance(value, str | bytes) and isinstance(value, Iterable) else ():
        check_keys(one)


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


def gather(tensor: Tensor, *, samples: int | None = None) -> Tensor:
    """Return the rows of every rank's tensor, in order of rank, on every rank, without padding.

    Each rank may have any number of rows, or none. A tensor without dimensions is one row.
    With `samples`, the length of a dataset whose loader does not shuffle, the rows are in the order
    of the dataset, without those that the loader repeats. The result has no gradient. Raises
    ValueError on every rank if rows differ in shape or dtype.
    """
    mine = _content(tensor) if tensor.dim() else _content(tensor).view(1)
    told = gather_json([[*mine.shape], str(mine.dtype)[6:]])
    kinds = [[shape[1:], dtype] for shape, dtype in told if shape[0]]
    if not kinds or not dist.is_initialized():
        return mine[:samples]
    for one in kinds:
        if one != kinds[0]:
            cause = f"rows differ between ranks ({kinds[0]} and {one})"
            raise ValueError(f"gather: {cause}; make their shape and dtype match")
    shape, dtype = kinds[0]
    own = mine.to(_device()).contiguous().view(-1).view(torch.uint8)
    whole: Tensor = torch.cat(_gather(own)).view(getattr(torch, dtype)).view([-1, *shape])
    if samples is not None:  # rank r of n has the samples r, r + n, r + 2n and so on
        places = [(row, rank) for rank, (shape, _) in enumerate(told) for row in range(shape[0])]
        order = sorted(range(len(places)), key=places.__getitem__)
        whole = whole[order[:samples]]
    return whole.to(tensor.device)


def _content(tensor: Tensor) -> Tensor:
    """Return a tensor without gradient whose memory holds its values, conjugated if it is."""
    return tensor.detach().resolve_conj().resolve_neg()


def broadcast(value: Any) -> Any:
    """Return rank 0's value on every rank: a tensor, or any JSON value; tuples become lists.

    The tensor has no gradient. It is on this process's GPU if rank 0's tensor is on a GPU,
    otherwise on the CPU. Raises TypeError on rank 0 for a key that is not text.
    """
    is_tensor = isinstance(value, Tensor)
    mine = [[*value.shape], str(value.dtype)[6:], value.device.type] if is_tensor else value
    is_tensor, told = gather_json([is_tensor, mine] if own_rank() == 0 else None)[0]
    if not is_tensor:
        return told
    shape, dtype, kind = told
    tensor = _content(value) if own_rank() == 0 else torch.empty(shape, dtype=getattr(torch, dtype))
    if dist.is_initialized() and tensor.numel():
        tensor = tensor.to(_device()).contiguous()
        content = tensor.view(-1).view(torch.uint8)  # not a copy
        with freed(content):
            dist.broadcast(content, 0)
    return tensor.to(kind)


def mean(tensor: Tensor) -> Tensor:
    """Return the mean over the ranks of tensors of equal shape, on every rank, without a gradient.

    The mean is float32 if the tensors have an integer type or a smaller floating-point type. Raises
    ValueError on every rank if their shapes or types differ.
    """
    sum_alike("mean", [str(tensor.dtype)[6:], f"shape {[*tensor.shape]}"], [])
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    where = _device() if dist.is_initialized() else tensor.device
    sums = _content(tensor).to(where, dtype, copy=True).contiguous()
    if dist.is_initialized():
        with freed(sums):
            dist.all_reduce(sums)
    return (sums / count_ranks()).to(tensor.device)


def sum_alike(call: str, kinds: Sequence[str], numbers: Sequence[float]) -> list[float]:
    """Return each number's sum over the ranks, in float64, with one all-reduce for up to 60.

    A checksum of `kinds`, which are the same on every rank, is exchanged with the numbers. If they
    differ, every rank raises a ValueError that names `call` and what differs.
    """
    if not has_group():
        return [*numbers]
    # The first message has the same size on every rank, whatever their kinds.
    halves = divmod(zlib.crc32("\0".join(kinds).encode()), 1 << 16)
    whole = [*halves, *(half**2 for half in halves), *numbers]
    sums = _sum(whole[:_FIRST] + [0.0] * (_FIRST - len(whole)))

    # Equal numbers, and only those, have this sum of squares; float64 is exact here.
    if any(sums[i] ** 2 != count_ranks() * sums[i + 2] for i in (0, 1)):
        everyone = gather_json([*kinds])
        rank = next(rank for rank, one in enumerate(everyone) if one != everyone[0])
        differ = ", ".join(sorted({*everyone[0]} ^ {*everyone[rank]}))
        cure = "pass the same names and types on every rank"
        raise ValueError(f"{call}: ranks 0 and {rank} differ in {differ}; {cure}")
    if len(whole) > _FIRST:
        sums += _sum(whole[_FIRST:])
    return sums[4 : len(whole)]


_FIRST = 64  # numbers in the first message


def _sum(numbers: list[float]) -> list[float]:
    sums = torch.tensor(numbers, dtype=torch.float64, device=_device())
    with freed(sums):
        dist.all_reduce(sums)
    return sums.tolist()


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
