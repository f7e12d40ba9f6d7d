"""Time and bandwidth of the collectives by size, as nccl-tests defines them.

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.torch import device, gather_json
from launcher.wire import limits

KIB, MIB = 2**10, 2**20
SIZES = (KIB, 64 * KIB, MIB, 16 * MIB)  # bytes of the whole array
GPU_SIZES = *SIZES, 256 * MIB


@dataclass(frozen=True)
class Measured:
    """One collective with one size of the whole array: seconds on the slowest rank, and bytes/s."""

    name: str
    num_bytes: int
    seconds: float
    algbw: float
    busbw: float

    def __str__(self) -> str:
        return (
            f"{self.name:<16}{size_text(self.num_bytes):>8}{self.seconds * 1e3:>11.3f} ms"
            f"{rate(self.algbw):>13}{rate(self.busbw):>13}"
        )


HEAD = f"{'collective':<16}{'size':>8}{'time':>14}{'algbw':>13}{'busbw':>13}"


def rate(bandwidth: float) -> str:
    """Return bytes/s in a readable form."""
    return f"{bandwidth / 1e9:.2f} GB/s" if bandwidth >= 1e8 else f"{bandwidth / 1e6:.2f} MB/s"


def size_text(num_bytes: int) -> str:
    """Return 65536 as "64 KiB"."""
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def _share(ranks: int) -> float:
    """Return the share of an array that the other ranks hold."""
    return (ranks - 1) / ranks


Call = Callable[[Tensor, Tensor], object]  # takes the whole array and this rank's part of it
COLLECTIVES: dict[str, tuple[Call, Callable[[int], float]]] = {  # with busbw / algbw for n ranks
    # A sum: NCCL's fastest algorithm is only for sums.
    "all-reduce": (lambda whole, part: dist.all_reduce(whole), lambda n: 2 * _share(n)),
    "all-gather": (dist.all_gather_into_tensor, _share),
    "reduce-scatter": (lambda whole, part: dist.reduce_scatter_tensor(part, whole), _share),
    "broadcast": (lambda whole, part: dist.broadcast(whole, src=0), lambda n: 1.0),
    "reduce": (lambda whole, part: dist.reduce(whole, dst=0), lambda n: 1.0),
    "all-to-all": (
        lambda whole, part: dist.all_to_all_single(torch.empty_like(whole), whole),
        _share,
    ),
}


def measure(names: Sequence[str]) -> Iterator[Measured]:
    """Yield the result of each collective with each size, within about COLLECTIVES_S for all.

    All ranks iterate together. Larger sizes are skipped once one call would take too long.
    """
    ranks = dist.get_world_size()
    sizes = GPU_SIZES if device().type == "cuda" else SIZES
    share_s = limits.COLLECTIVES_S / len(COLLECTIVES) / len(sizes)

    for name in names:
        call, factor = COLLECTIVES[name]
        measured = list[Measured]()
        for size in sizes:
            if _expected_s(measured, size) > limits.CALL_S:
                break

            part = torch.zeros(max(1, size // 4 // ranks), device=device())  # float32
            whole = torch.zeros(part.numel() * ranks, device=device())
            once = time_call(call, whole, part, 2)  # the first call is slower
            took = time_call(call, whole, part, 3 + int(share_s / once))
            algbw = whole.nbytes / took
            measured.append(Measured(name, size, took, algbw, algbw * factor(ranks)))
            yield measured[-1]


def _expected_s(measured: Sequence[Measured], size: int) -> float:
    """Estimate the time of one call with a larger size: the smallest size shows the latency."""
    if not measured:
        return 0.0
    latency_s = measured[0].seconds
    last = measured[-1]
    return latency_s + (last.seconds - latency_s) * size / last.num_bytes


def time_call(call: Call, whole: Tensor, part: Tensor, repeats: int) -> float:
    """Return the seconds of one call, averaged over `repeats`, on the slowest rank.

    All ranks call this.
    """
    dist.barrier()
    whole.sum().item()  # wait until the GPU is idle
    start = time.perf_counter()
    for _ in range(repeats):
        call(whole, part)
    (whole[0] + part[0]).item()  # wait until the last call is done
    took = (time.perf_counter() - start) / repeats
    return float(max(gather_json(took)))
