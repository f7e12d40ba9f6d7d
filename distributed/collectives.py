"""Exchange bytes, tensors and values between ranks, and copy rank 0's weights to all ranks.

Each call except broadcast_weights begins with a message of one size, which holds a hash of what
must be the same on all ranks. If the hashes differ, all ranks raise an error that says how:
otherwise gloo would mix different values without an error, or abort, and NCCL would hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .environment import LauncherError, detect
from .errors import some_of, with_fault
from .torch_internals import device_of, held_by_gloo, time_limit

_ROOM = 60  # values in the first message of a call, beside the hash
_MARKS = 1 << 20  # hashes: the squares of 8,192 ranks' hashes have an exact sum

_has_joined = False  # this process; a forked child inherits it
_is_forked_child = False  # a rank has forked this process


def has_group() -> bool:
    """Return whether there is a process group.

    Raises LauncherError if the launcher started several ranks and this one has not joined the
    others, or has left them: it would train alone.
    """
    if dist.is_initialized():
        return True
    if (ranks := _count_started()) > 1:
        raise LauncherError(
            f"this process is one of {ranks} ranks, but has not joined the others; "
            "call init_distributed() first, or unset RANK in a process that is not a rank"
        )
    return False


def _count_started() -> int:
    """Return how many ranks the launcher started; 1 in a child started with multiprocessing."""
    with contextlib.suppress(ValueError):  # contradicting variables; init_distributed reports them
        if multiprocessing.parent_process() is None:  # neither a data worker nor one of a pool
            return detect().world_size
    return 1


def record_join() -> None:
    """Record that this process has joined the others, so that `barrier` knows if it has left."""
    global _has_joined
    _has_joined = True


def _mark_forked_child() -> None:
    """In a forked child, record whether a rank has forked it: it inherits a group, but no peers."""
    global _is_forked_child
    _is_forked_child = dist.is_initialized()


os.register_at_fork(after_in_child=_mark_forked_child)


def own_rank() -> int:
    """Return this process's rank in the process group; 0 in a run of a single process."""
    return dist.get_rank() if has_group() else 0


def count_ranks() -> int:
    """Return how many ranks have joined; 1 in a run of a single process."""
    return dist.get_world_size() if has_group() else 1


def gloo_group() -> dist.ProcessGroup:
    """Create a gloo group with a limit of at least 30 minutes. All ranks must call this."""
    limit = max(time_limit(), dist.default_pg_timeout)
    return dist.new_group(backend="gloo", timeout=limit)  # type: ignore[no-any-return]


def barrier() -> None:
    """Wait for every rank; do nothing in a run of a single process, or in a rank that has left.

    A rank counts as joined after init_distributed() or the first exchange through this module.
    Raises ValueError on every rank if another rank calls a different function, and LauncherError in
    a rank that has not joined.
    """
    has_left = _has_joined and not dist.is_initialized()
    if not has_left and has_group():
        add_up([], "barrier")


# --- what must be the same on all ranks ---------------------------------------------------------


def add_up(
    values: Sequence[float], call: str, *details: str, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Return each value's sum over the ranks, in float64, with one all-reduce for up to 60 values.

    Every rank must pass equally many. Raises ValueError on every rank if `call`, the caller's name,
    or the details differ between ranks, and LauncherError in a child process that a rank has
    forked: it would wait forever.
    """
    if _is_forked_child:
        raise LauncherError(f"{call}: this is a child process of a rank; call it in the rank")
    record_join()

    mark = zlib.crc32(json.dumps([call, *details]).encode()) % _MARKS
    first = values[:_ROOM]
    rest = values[_ROOM:]
    padding = [0.0] * (_ROOM - len(first))
    marks, squares, *sums = _sum([mark, mark * mark, *first, *padding], group)
    if not _are_equal(marks, squares, count_ranks()):
        _refuse_different([call, *details], group)
    return [*sums[: len(first)], *(_sum(rest, group) if rest else [])]


def _sum(numbers: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """Return each number's sum over the ranks, in float64. All ranks must pass equally many."""
    sums = torch.tensor(numbers, dtype=torch.float64, device=device_of(group))
    with held_by_gloo(sums):
        dist.all_reduce(sums, group=group)
    return sums.tolist()


def _are_equal(total: float, squares: float, count: int) -> bool:
    """Return whether `count` integers with this sum, and this sum of squares, are all equal."""
    return count * int(squares) == int(total) ** 2  # otherwise greater (Cauchy-Schwarz)


def _refuse_different(own: list[str], group: dist.ProcessGroup | None) -> NoReturn:
    """Raise ValueError on all ranks, with what differs in `own`: a call's name and its details."""
    calls = [json.loads(one) for one in gather_bytes(json.dumps(own).encode(), group)]
    common = set.intersection(*map(set, calls))
    ranks_of: dict[str, list[int]] = defaultdict(list)  # by what only they have passed
    for rank, words in enumerate(calls):
        special = [word for word in words if word not in common]
        ranks_of[", ".join(special) or "nothing else"].append(rank)

    parts = [
        f"{text} on {'ranks' if len(ranks) > 1 else 'rank'} {some_of(ranks, 8)}"
        for text, ranks in ranks_of.items()
    ]
    call = own[0] if own[0] in common else "the ranks call different functions"
    cure = "make the same calls on every rank, with the same names, shapes and types"
    cause = f"{call}: {some_of(parts, 4, '; ')}"
    raise with_fault(ValueError, "collective-mismatch", f"{cause}; {cure}")


# --- bytes and values ---------------------------------------------------------------------------


def gather_bytes(
    data: bytes, group: dist.ProcessGroup | None = None, call: str = "gather_bytes"
) -> list[bytes]:
    """Return every rank's bytes, in order of rank, on every rank; `group` contains all ranks.

    torch's own all_gather_object would unpickle what other ranks send. Raises ValueError on every
    rank if `call`, the caller's name, differs: the ranks have called different functions.
    """
    if not has_group():
        return [data]
    mine = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[:-1]  # rejects b""
    return [to_bytes(one.cpu()) for one in _gather(mine.to(device_of(group)), call, group)]


def _gather(mine: Tensor, call: str, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return every rank's bytes as one-dimensional tensors, in order of rank."""
    own = [0.0] * count_ranks()
    own[own_rank()] = len(mine)  # so the sums are the sizes on all ranks
    sizes = [int(one) for one in add_up(own, call, group=group)]

    padded = mine.new_zeros(max(sizes) + 1)  # of equal size on all ranks, and never empty
    padded[: len(mine)] = mine
    everyone = [torch.empty_like(padded) for _ in sizes]
    with held_by_gloo(padded, *everyone):
        dist.all_gather(everyone, padded, group=group)
    return [one[:size] for one, size in zip(everyone, sizes, strict=True)]


def gather_json(value: Any, call: str = "gather_json") -> list[Any]:
    """Return every rank's JSON value, in order of rank, on every rank.

    Raises TypeError on every rank if a value is not JSON, or JSON would change it, such as a tuple.
    """
    answers = [json.loads(one) for one in gather_bytes(_encode(value), call=call)]
    for rank, (_, problem) in enumerate(answers):
        if problem:
            raise TypeError(f"{call}: on rank {rank}, {problem}; pass text, numbers, lists, dicts")
    return [found for found, _ in answers]


def _encode(value: Any) -> bytes:
    """Return as JSON the pair of the value and "", or of null and why JSON cannot hold it."""
    try:
        problem = next(_changes(value), "")
        return json.dumps([None if problem else value, problem]).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps([None, f"the value is not JSON ({error})"]).encode()


def _changes(value: Any) -> Iterator[str]:
    """Yield what JSON would silently change in a value."""
    if isinstance(value, tuple):
        yield f"the tuple {value!r:.80} would become a list"
    if isinstance(value, dict):
        others = (key for key in value if not isinstance(key, str))
        yield from (f"the key {key!r:.80} would become text" for key in others)
        value = [*value.values()]
    for one in value if isinstance(value, list) else ():
        yield from _changes(one)


# --- tensors ------------------------------------------------------------------------------------


def gather(tensor: Tensor, *, samples: int | None = None) -> Tensor:
    """Return the rows of every rank's tensor, in order of rank, on every rank, without padding.

    Each rank may have any number of rows, or none. A tensor without dimensions is one row.
    With `samples`, the length of a data set that the ranks have read with the helper's loader and
    `shuffle=False`, the rows are in the order of the data set, without the loader's repeats.
    The result is on this tensor's device, without a gradient. Raises ValueError on every rank if
    rows differ in shape or dtype, or there are more rows than such a loader yields.
    """
    mine: Tensor = torch.atleast_1d(tensor.detach())  # type: ignore[no-untyped-call]
    call = "gather" if samples is None else f"gather of {samples} samples"
    forms = gather_json([[*mine.shape], _dtype_name(mine)], call=call)
    kinds = [[shape[1:], dtype] for shape, dtype in forms if shape[0]]  # of the ranks with rows
    for kind in kinds:
        if kind != kinds[0]:
            cause = f"rows differ between ranks ({kinds[0]} and {kind})"
            raise ValueError(f"gather: {cause}; make their shape and dtype match")

    rows = sum(shape[0] for shape, _ in forms)  # of all ranks
    if samples is not None and rows >= samples + count_ranks():  # a loader repeats fewer samples
        cure = "pass one row for each sample, of one epoch"
        raise ValueError(f"gather: the ranks have {rows} rows for {samples} samples; {cure}")
    if not kinds or not has_group():
        return mine[:samples]

    shape, dtype = kinds[0]
    parts = [_from_bytes(one, dtype, [-1, *shape]) for one in _gather(_as_bytes(mine), call)]
    whole = torch.cat(parts) if samples is None else _interleave(parts)[:samples]
    return whole.to(tensor.device)


def _interleave(parts: list[Tensor]) -> Tensor:
    """Return first each part's first row, then each part's second row, and so on."""
    places = [rank + len(parts) * torch.arange(len(part)) for rank, part in enumerate(parts)]
    return torch.cat(parts)[torch.cat(places).argsort()]


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's content, one-dimensional, on the device of the process group."""
    whole = tensor.detach().resolve_conj().resolve_neg().to(device_of()).contiguous()
    return whole.view(-1).view(torch.uint8)


def _from_bytes(content: Tensor, dtype: str, shape: list[int]) -> Tensor:
    """Undo _as_bytes(): the result shares the memory of `content`."""
    return content.view(getattr(torch, dtype)).view(shape)


def broadcast(value: Any) -> Any:
    """Return rank 0's value, a tensor or JSON, on every rank; the other ranks' values are ignored.

    The tensor has no gradient. It is on this process's GPU if rank 0's tensor is on a GPU,
    otherwise on the CPU. Raises TypeError on every rank if JSON cannot hold the value unchanged.
    """
    is_tensor = isinstance(value, Tensor)
    mine = [[*value.shape], _dtype_name(value), value.device.type] if is_tensor else value
    answers = gather_json([is_tensor, mine] if own_rank() == 0 else None, call="broadcast")
    is_tensor_sent, sent = answers[0]
    if not is_tensor_sent:
        return sent
    if not has_group():
        return value.detach()
    shape, dtype, device_type = sent
    empty = torch.empty(shape, dtype=getattr(torch, dtype))
    content = _as_bytes(value if own_rank() == 0 else empty)
    if len(content):
        with held_by_gloo(content):
            dist.broadcast(content, 0)
    return _from_bytes(content, dtype, shape).to(device_type)


def mean(tensor: Tensor) -> Tensor:
    """Return the mean over the ranks of tensors of equal shape, on every rank, without a gradient.

    It is on this tensor's device, and float32 for integers and smaller floating-point types.
    Raises ValueError on every rank if the shapes or types differ.
    """
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if not has_group():
        return tensor.detach().to(dtype, copy=True)
    add_up([], "mean", f"the shape {[*tensor.shape]}", f"the type {_dtype_name(tensor)}")
    whole = tensor.detach().resolve_conj().resolve_neg()
    sums = whole.to(device_of(), dtype, copy=True).contiguous()
    with held_by_gloo(sums):
        dist.all_reduce(sums)
    return (sums / count_ranks()).to(tensor.device)


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """Run the body on rank 0 first, then on all other ranks at the same time.

    The other ranks wait at most as long as for any collective. If the body raises on rank 0, they
    skip it and raise a RuntimeError.
    """
    if own_rank() == 0:
        is_done = False
        try:
            yield
            is_done = True
        finally:
            gather_json(is_done, call="main_first")
    elif gather_json(None, call="main_first")[0]:
        yield
    else:
        raise RuntimeError("rank 0 failed in main_first(); its message says why")


def to_bytes(tensor: Tensor) -> bytes:
    """Return a copy of a contiguous CPU tensor's memory, without NumPy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def broadcast_weights(module: nn.Module) -> None:
    """Copy rank 0's unsharded parameters and buffers to all ranks. All ranks must call this."""
    for tensor in *module.parameters(), *module.buffers():
        if not hasattr(tensor, "full_tensor"):
            data = tensor.data
            with held_by_gloo(data):
                dist.broadcast(data, src=0)
