"""How fast each rank computes on its own."""

from __future__ import annotations

import time

import torch

from distributed.torch import device

CPU_TURNS = 16  # ranks on CPUs may share them, so they take turns
_SHAPES = {"cpu": (256, torch.float32, 1), "cuda": (4096, torch.bfloat16, 16)}


def turns(ranks: int) -> int:
    """Return in how many turns the ranks compute: those on GPUs all at once."""
    return min(ranks, CPU_TURNS) if device().type == "cpu" else 1


def measure(seconds: float) -> float:
    """Return the FLOP/s of products of two square matrices, over `seconds`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other wherever one CPU is busy
    side, dtype, at_once = _SHAPES[device().type]
    matrix = torch.ones(side, side, dtype=dtype, device=device())
    result = matrix @ matrix
    result[0, 0].item()
    products, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < seconds:
        for _ in range(at_once):
            torch.matmul(matrix, matrix, out=result)
        result[0, 0].item()  # a GPU has done them
        products += at_once
    torch.set_num_threads(threads)
    return 2 * side**3 * products / took
