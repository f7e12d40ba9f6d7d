"""Ranks that are forks of the test process, and have joined over gloo."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from distributed import torch as helper


def on_ranks(count: int, function: Callable[..., None], folder: Path, *arguments: object) -> None:
    """Run function(rank, folder, *arguments) on ranks that have joined."""
    settings = (function, count, folder, arguments)
    start_processes(_rank, settings, nprocs=count, start_method="fork")  # type: ignore[no-untyped-call]


def _rank(
    rank: int, function: Callable[..., None], count: int, folder: Path, arguments: tuple[Any, ...]
) -> None:
    meeting = f"file://{folder}/store"
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count, timeout=limit)
    function(rank, folder, *arguments)
    helper.finish()
