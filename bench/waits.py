"""Run train.py and find steps that wait for the GPU: python bench/waits.py --config FILE ...

Between two log lines the CPU runs ahead of the GPU; a step that reads a tensor's value would make
it wait. On a GPU, torch itself names such lines of code (torch.cuda.set_sync_debug_mode). Without
a GPU, torch's profiler and the calls that read a tensor show what would wait. Prints what it finds
on each rank, and exits with 1 if it finds anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import train
from distributed import torch as helper
from training.arguments import read_command_line

WARM_UP = 3  # steps in which torch compiles and tunes
OPERATIONS = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "equal"}
CALLS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"}
take_step = train.Run.take_step
found: set[str] = set()


class Calls(TorchFunctionMode):
    """Records the calls that read a tensor's value."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found.update({getattr(function, "__name__", "")} & CALLS)
        return function(*args, **(kwargs or {}))


def take_watched_step(run: train.Run, step: int) -> None:
    if step < WARM_UP:
        take_step(run, step)
    elif torch.cuda.is_available():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            take_step(run, step)
            torch.cuda.set_sync_debug_mode("default")
        # Another warning, which says that the mode is a prototype, also mentions such operations.
        waits = [one for one in told if "called a synchronizing" in str(one.message)]
        found.update(f"{Path(one.filename).name}:{one.lineno}" for one in waits)
    else:
        with torch.profiler.profile() as profiler, Calls():
            take_step(run, step)
        events = [event for event in profiler.events() or () if not is_fused(event)]
        names = {event.name.removeprefix("aten::") for event in events}
        assert any("Backward" in name for name in names), "the profiler has seen no step"
        found.update(names & OPERATIONS)


def is_fused(event: Any) -> bool:
    """Return whether this event is a fused optimizer's, which reads its step count only on CPUs."""
    while event is not None and "_fused_" not in event.name:
        event = event.cpu_parent
    return event is not None


if __name__ == "__main__":
    arguments, settings = read_command_line(__doc__)
    train.Run.take_step = take_watched_step  # type: ignore[assignment, method-assign]
    code = train.train(arguments, settings)
    print(f"waits      {', '.join(sorted(found)) or 'none'}", flush=True)
    helper.finish(1 if found else code)
