"""The rows of `make test-nccl` that cause a failure, under our launcher and under torchrun."""

from __future__ import annotations

import re
from functools import partial

from gpu_runs import HAS_GPU, Failed, Machine
from rows import Row
from watched import THEIRS_S, Sight, watch_both

RANKS, MANY = 4, 8
HANG_S = 20 if HAS_GPU else 15  # a GPU's first step takes longer
HANGS = ("leaves", "stop", "skips", "shapes", "types")  # perhaps, so these have a limit
LOST = ("link-lost", "nccl-error", "rank-error", "rank-crashed", "rank-stuck")
STUCK = ("rank-stuck", "collective-mismatch")
FAILURES: list[tuple[str, str, tuple[str, ...], float]] = [
    # row, what happens, faults of which our launcher may name one, seconds for torchrun
    ("`raise` on rank 1, the others in an all-reduce", "raise", ("rank-error",), THEIRS_S),
    ("`kill -9` of rank 1", "rank", ("rank-killed",), THEIRS_S),
    ("`kill -9` of the launcher", "launcher", ("",), THEIRS_S),
    ("`kill -9` of the node agent", "agent", ("agent-killed",), THEIRS_S),
    ("out of memory on rank 1", "memory", ("out-of-memory",), THEIRS_S),
    ("an illegal memory access on rank 1", "illegal", ("cuda-error",), THEIRS_S),
    ("rank 1 leaves early, with code 0", "leaves", LOST, THEIRS_S),
    ("SIGSTOP of rank 1", "stop", STUCK, THEIRS_S),
    ("rank 1 skips an all-gather", "skips", (*STUCK, *LOST), THEIRS_S),
    ("rank 1 reduces a tensor of another size", "shapes", (*STUCK, *LOST), THEIRS_S),
    ("rank 1 reduces a tensor of another type", "types", (*STUCK, *LOST), THEIRS_S),
    ("an all-reduce outlives `timeout_s`", "outlives", (*STUCK, *LOST), HANG_S + THEIRS_S),
]


def fail(
    machine: Machine, what: str, faults: tuple[str, ...], theirs_s: float, ranks: int = RANKS
) -> str:
    """Cause a failure; returns what both launchers show, or raises Failed if ours is wrong."""
    limits = {"HANG_SECONDS": str(HANG_S)} if what in HANGS else {}
    ours, theirs = watch_both(machine, what, what, ranks, theirs_s, **limits)
    told = f"{show_block(ours)}; {ours.tell()}; torchrun: {theirs.tell()}"
    if fault_of(ours) not in faults or not ours.ended.code or not ours.is_clean():
        raise Failed(f"expected {' or '.join(faults) or 'no block'}, and nothing left: {told}")
    return told


def fault_of(sight: Sight) -> str:
    """Return the fault that the failure block names; empty without a block."""
    named = re.search(r"\[([a-z-]+)\]$", sight.ended.block().get("FAILED", ""))
    return named[1] if named else ""


def show_block(sight: Sight) -> str:
    """Return the fault, the rank and the cause of the failure block."""
    block = sight.ended.block()
    if "FAILED" not in block:
        return "no block"
    who = block["FAILED"].partition(" (")[0]
    calls = re.search(r"\bdefault_pg: .{0,200}", sight.ended.text)  # from the flight recorder
    told = f"{who} [{fault_of(sight)}] {block.get('cause', '')[:160]}"
    return f"{told}; {calls[0]}".replace("|", "/") if calls else told.replace("|", "/")


ROWS = [
    Row(
        name,
        partial(fail, what=what, faults=faults, theirs_s=theirs_s),
        needs_gpu=what == "illegal",
    )
    for name, what, faults, theirs_s in FAILURES
]


def debug(machine: Machine) -> str:
    """Without NCCL, torch's own log takes the place of NCCL's."""
    variables = {"NCCL_DEBUG": "INFO"} if HAS_GPU else {"TORCH_CPP_LOG_LEVEL": "INFO"}
    ours, theirs = watch_both(machine, "debug", "raise", MANY, THEIRS_S, **variables)
    lines, others = (sight.ended.text.splitlines() for sight in (ours, theirs))
    told = f"{len(lines)} lines, torchrun {len(others)}; {show_block(ours)}"
    if fault_of(ours) != "rank-error" or not lines[-1].startswith("see "):
        raise Failed(f"the block is not last: {lines[-1]}; {told}")
    return told
