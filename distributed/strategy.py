"""The strategies that spread a model over processes, and what each one needs (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from .environment import LauncherError

STRATEGIES = "auto", "single", "dp", "ddp", "fsdp"


@dataclass(frozen=True)
class Sharding:
    """How fsdp shards a model."""

    shard: str | int = "all"  # over all ranks; node: within a node; N: in groups of N ranks
    reshard_after_forward: bool = True  # False: keep gathered parameters for the backward pass
    dtype: str | None = None  # to compute in, such as bfloat16; parameters keep their type
    cpu_offload: bool = False  # keep parameters in the CPU's memory until needed


def check_strategy(strategy: str, world_size: int = 1, shard: str | int = "all") -> str:
    """Check a strategy and return it.

    Raises ValueError if it is unknown, and LauncherError if it cannot run in that many processes.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is unknown; use {', '.join(STRATEGIES)}")
    if strategy in ("single", "dp") and world_size > 1:
        raise LauncherError(
            f"strategy {strategy} runs in one process but the launcher started {world_size}; "
            "use strategy ddp, or start one process"
        )
    if strategy == "fsdp" and isinstance(shard, int) and world_size > 1 and world_size % shard:
        raise LauncherError(
            f"fsdp.shard: {world_size} ranks cannot be split into groups of {shard}; "
            f"use all, or a divisor of {world_size}"
        )
    return strategy
