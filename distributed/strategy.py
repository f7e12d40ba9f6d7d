"""The strategies that spread a model over processes, and what each one needs (no torch)."""

from __future__ import annotations

from .environment import LauncherError

STRATEGIES = ("auto", "single", "dp", "ddp")
_ONE_PROCESS = ("single", "dp")


def check_strategy(strategy: str, world_size: int = 1) -> str:
    """Return the strategy.

    Raises ValueError if it is unknown, and LauncherError if it cannot run on so many processes.
    """
    if strategy == "fsdp":
        raise ValueError("strategy fsdp is not built yet; use ddp")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is unknown; use {', '.join(STRATEGIES)}")
    if strategy in _ONE_PROCESS and world_size > 1:
        cause = f"strategy {strategy} runs in one process but the launcher started {world_size}"
        raise LauncherError(f"{cause}; use strategy ddp, or start one process")
    return strategy
