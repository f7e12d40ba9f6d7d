"""Compare launchers from launch to first step: `make bench-launch`, or bench/launch.py [RUNS].

Measures the seconds from the start of the launcher to the end of a DDP model's first optimizer step
on the slowest rank. The launchers run in turn, RUNS times (default 7). Their medians are compared.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import others
from harness import (
    AGENT,
    ROOT,
    TORCHRUN,
    in_turns,
    ratio,
    render,
    run,
    spread,
    times_or,
    write_section,
)

PROGRAM = str(ROOT / "bench/small_steps.py")
PYTHON = sys.executable
PROCESSES = (2, 8)
IMPORTS = "import of torch, _dynamo"
HEAD = ("processes", "launcher", "median s", "min-max s", "x torchrun", f"x {IMPORTS}")

Start = Callable[[dict[str, str]], object]  # takes variables for the ranks


def main() -> None:
    runs = times_or(7)
    rows = []
    for nproc in PROCESSES:
        measures = {
            name: functools.partial(time_first_step, start, nproc)
            for name, start in launchers(nproc).items()
        }
        measures["import of torch"] = functools.partial(time_import, "torch")
        measures[IMPORTS] = functools.partial(time_import, "torch, torch._dynamo")
        found = in_turns(measures, runs, warm_up=1)
        for name, seconds in found.items():
            ratios = [f"{ratio(seconds, found[other]):.2f}" for other in ("torchrun", IMPORTS)]
            rows.append([str(nproc), name, *spread(seconds), *ratios])
    write_section("launch", f", medians of {runs}", render(HEAD, rows))


def launchers(nproc: int) -> dict[str, Start]:
    """Return functions that start the ranks and wait for them, by name."""
    count = f"--nproc-per-node={nproc}"
    commands: dict[str, list[str]] = {
        "ours": [*AGENT, count, PROGRAM],
        "torchrun": [*TORCHRUN, count, PROGRAM],
    }
    if deepspeed := others.find("deepspeed", "deepspeed"):
        options = ["--num_accelerators", str(nproc), "--master_port", "29612", "--no_local_rank"]
        commands["DeepSpeed"] = [str(deepspeed), *options, PROGRAM]

    def starts(command: list[str]) -> Start:
        return lambda variables: run(*command, **variables)

    by_hand = functools.partial(start_by_hand, nproc)
    return {name: starts(command) for name, command in commands.items()} | {"by hand, `&`": by_hand}


def time_first_step(start: Start, nproc: int) -> float:
    """Run a launcher to its end; returns the seconds until the last rank's first step."""
    with tempfile.TemporaryDirectory() as folder:
        file, began = Path(folder, "steps"), time.time()
        start({"STEPS_FILE": str(file), "STEPS": "1"})
        first = [float(line.split()[-1]) for line in file.read_text().splitlines()]
    assert len(first) == nproc
    return max(first) - began


def start_by_hand(nproc: int, variables: dict[str, str]) -> None:
    """Start every rank at once, as a shell's `&` does; each imports torch itself."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "WORLD_SIZE": str(nproc)}
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables, **world}
    ranks = [
        subprocess.Popen([PYTHON, PROGRAM], env={**environ, "RANK": str(rank)})
        for rank in range(nproc)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise RuntimeError(f"ranks started by hand ended with {codes}")


def time_import(modules: str) -> float:
    began = time.time()
    run(PYTHON, "-c", f"import {modules}")
    return time.time() - began


if __name__ == "__main__":
    main()
