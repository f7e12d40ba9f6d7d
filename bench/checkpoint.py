"""Compare our saving with torch's own methods: `make bench-checkpoint`, or
PYTHONPATH=. python bench/checkpoint.py [RUNS].

Measures how long one save blocks the training loop, how long it takes to reach the disk, and how
much time four saves add to a loop of 400 steps. Each measurement runs in a single-threaded process
with its own folder, and starts when no writes to the disk are pending. The methods take turns,
RUNS times each (default 3), so that their medians can be compared.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from harness import in_turns, render, spread, times_or, write_section
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint import state_dict_saver as dcp

from distributed.checkpoint import Saver, State

SIZES_GB = (0.1, 0.5, 1.6)  # of the weights and AdamW's two moments together
WIDTH = 1024  # of a layer, which has WIDTH x WIDTH weights
SAVES = 2  # in one process: the first may allocate memory, the second does not
STEPS = 400  # of the loop, at the largest size
SAVE_EVERY = 100  # steps
TRAINED = 13  # layers that a step of the loop trains
BATCH = 64
STALL_TARGETS = {"torch.save": 0.15, "dcp.async_save": 0.3}
ADDED_TARGET = 1.0
NONE, TORCH, OURS = "no saves", "torch.save", "ours"

Result = TypeVar("Result")
Finish = Callable[[], object]  # returns when this method has nothing left to do
Save = Callable[[int], Finish]  # blocks the loop for as long as this method does


class Times(NamedTuple):
    """Times of one save, in seconds from its call."""

    stall: float  # until it returns
    total: float  # until it is done


class Training(NamedTuple):
    """What is saved and trained."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


# --- methods of saving --------------------------------------------------------------------------


def with_ours(folder: Path, training: Training) -> Save:
    saver = Saver(folder / "run", keep_last=STEPS)

    def save(step: int) -> Finish:
        saver.save(step, State(**training.state(), progress={"step": step}, ranks=[]))
        return saver.wait

    return save


def with_torch(folder: Path, training: Training) -> Save:
    def save(step: int) -> Finish:
        torch.save(training.state(), folder / f"{step}.pt")
        return done

    return save


def with_torch_and_fsync(folder: Path, training: Training) -> Save:
    def save(step: int) -> Finish:
        file = folder / f"{step}.pt"
        torch.save(training.state(), file)
        with file.open() as saved:
            os.fsync(saved.fileno())
        return done

    return save


def with_dcp(folder: Path, training: Training) -> Save:
    start_group()

    def save(step: int) -> Finish:
        dcp.save(training.state(), checkpoint_id=folder / str(step))
        return done

    return save


def with_async_dcp(folder: Path, training: Training) -> Save:
    start_group()

    def save(step: int) -> Finish:
        saved = dcp.async_save(training.state(), checkpoint_id=folder / str(step))
        assert isinstance(saved, Future)
        return saved.result

    return save


def without(folder: Path, training: Training) -> Save:
    return lambda step: done


def done() -> None:
    """Do nothing: the save is already done."""


def start_group() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


WAYS: dict[str, Callable[[Path, Training], Save]] = {
    NONE: without,
    OURS: with_ours,
    TORCH: with_torch,
    "torch.save, fsync": with_torch_and_fsync,
    "dcp.save": with_dcp,
    "dcp.async_save": with_async_dcp,
}
IN_LOOP = (NONE, OURS, TORCH, "torch.save, fsync")


# --- measuring, each in its own process ---------------------------------------------------------


def time_saves(way: str, size_gb: float) -> list[Times]:
    training = build(size_gb)
    times = []
    with tempfile.TemporaryDirectory() as folder:
        save = WAYS[way](Path(folder), training)
        for step in range(SAVES):
            os.sync()
            began = time.perf_counter()
            finish = save(step)
            stall = time.perf_counter() - began
            finish()
            times.append(Times(stall, time.perf_counter() - began))
    return times


def time_loop(way: str) -> float:
    """Return the seconds from the start of the loop until its last checkpoint is done."""
    training = build(SIZES_GB[-1])
    layers, inputs = training.model[:TRAINED], torch.randn(BATCH, WIDTH)
    finish: Finish = done
    with tempfile.TemporaryDirectory() as folder:
        save = WAYS[way](Path(folder), training)
        os.sync()
        began = time.perf_counter()
        for step in range(1, STEPS + 1):
            layers(inputs).sub(inputs).square().sum().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            if step % SAVE_EVERY == 0:
                finish = save(step)
        finish()
        return time.perf_counter() - began


def build(size_gb: float) -> Training:
    """Return weights and moments of this total size; the moments are those after one step."""
    torch.set_num_threads(1)
    count = round(size_gb * 1e9 / (3 * 4 * WIDTH**2))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    for weights in model.parameters():
        weights.grad = torch.randn_like(weights)
    optimizer.step()
    optimizer.zero_grad()
    return Training(model, optimizer)


# --- the tables ---------------------------------------------------------------------------------


def main() -> None:
    runs = times_or(3)
    saves: dict[tuple[float, str], Callable[[], list[Times]]] = {
        (size_gb, way): functools.partial(apart, time_saves, way, size_gb)
        for size_gb in SIZES_GB
        for way in WAYS
        if way != NONE
    }
    loops: dict[str, Callable[[], float]] = {
        way: functools.partial(apart, time_loop, way) for way in IN_LOOP
    }
    about = f", {file_system()}, medians of {runs}"
    tables = describe_saves(in_turns(saves, runs)), describe_walls(in_turns(loops, runs))
    write_section("checkpoint", about, *tables)


def apart(measure: Callable[..., Result], *case: object) -> Result:
    """Measure in a new process, which inherits no memory from the previous measurement."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, *case).result()


def describe_saves(saves: dict[tuple[float, str], list[list[Times]]]) -> str:
    first = {case: statistics.median(run[0].stall for run in seen) for case, seen in saves.items()}
    stall = {case: statistics.median(run[-1].stall for run in seen) for case, seen in saves.items()}
    rows = []
    for (size_gb, way), seen in saves.items():
        case = size_gb, way
        ratios = [f"{stall[case] / stall[size_gb, other]:.2f}" for other in STALL_TARGETS]
        total = statistics.median(run[-1].total for run in seen)
        stalls = [f"{first[case]:.3f}", f"{stall[case]:.3f}"]
        rows.append([str(size_gb), way, *stalls, *ratios, f"{total:.2f}"])
    others = [f"x {way}" for way in STALL_TARGETS]
    head = ["state GB", "saved by", "first stall s", "stall s", *others, "done after s"]
    targets = " and ".join(f"{most} x {way}" for way, most in STALL_TARGETS.items())
    return (
        f"{render(head, rows)}\n\n"
        "The stall is how long a save blocks the training loop. The first save in a process takes"
        " longer; the x columns compare later saves. Ours and dcp are done when the files are"
        " on the disk (fsync), and ours also hashes them. torch.save alone leaves the writing to"
        f" the kernel. Target for ours at {SIZES_GB[-1]} GB: at most {targets}."
    )


def describe_walls(walls: dict[str, list[float]]) -> str:
    middle = {way: statistics.median(wall) for way, wall in walls.items()}
    added = {way: middle[way] - middle[NONE] for way in walls}
    rows = [
        [way, *spread(wall, 1), f"{added[way]:.1f}", f"{added[way] / added[TORCH]:.2f}"]
        for way, wall in walls.items()
    ]
    head = [f"{STEPS} steps", "median s", "min-max s", "added s", "x torch.save"]
    return (
        f"{render(head, rows)}\n\n"
        f"{SIZES_GB[-1]} GB are saved every {SAVE_EVERY} steps. The first save, and the wait for"
        f" the last one, are included. Target for the time that ours adds: at most {ADDED_TARGET} x"
        " torch.save."
    )


def file_system() -> str:
    command = ["df", "--output=fstype", tempfile.gettempdir()]
    return subprocess.check_output(command, text=True).split()[-1]


if __name__ == "__main__":
    main()
