"""Launch to first step, side by side: `make bench-launch`, or python bench/launch.py [RUNS].

From the start of the launcher to the end of the first optimizer step of a DDP model on the slowest
rank, in seconds. All launchers run in turn, RUNS times (default 7), in one go: medians compare.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import others
from table import describe_machine, render, write_section

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = str(ROOT / "bench/first_step.py")
PYTHON = sys.executable
PROCESSES = (2, 8)

Start = Callable[[dict[str, str]], object]
Measure = Callable[[], float]


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    deepspeed = others.find("deepspeed", "deepspeed")
    imports: dict[str, Measure] = {
        "import torch": lambda: time_import("torch"),
        "import torch, torch._dynamo": lambda: time_import("torch, torch._dynamo"),
    }
    rows = []
    for nproc in PROCESSES:
        measures = {**launchers(nproc, deepspeed), **imports}
        times: dict[str, list[float]] = {name: [] for name in measures}
        for number in range(runs + 1):
            for name, measure in measures.items():
                seconds = measure()
                if number > 0:  # the first round only warms the caches
                    times[name].append(seconds)
        rows += [summarise(nproc, name, times) for name in measures]
    head = [
        "processes",
        "launcher",
        "median s",
        "min-max s",
        "x torchrun",
        "x import of torch, _dynamo",
    ]
    text = f"{describe_machine('make bench-launch')}, medians of {runs}\n\n{render(head, rows)}"
    write_section("launch", text)


def summarise(nproc: int, name: str, times: dict[str, list[float]]) -> list[str]:
    middle = {each: statistics.median(seconds) for each, seconds in times.items()}
    return [
        str(nproc),
        name,
        f"{middle[name]:.2f}",
        f"{min(times[name]):.2f}-{max(times[name]):.2f}",
        f"{middle[name] / middle['torchrun']:.2f}",
        f"{middle[name] / middle['import torch, torch._dynamo']:.2f}",
    ]


def launchers(nproc: int, deepspeed: Path | None) -> dict[str, Measure]:
    """Name -> one measurement, in seconds."""
    count = f"--nproc-per-node={nproc}"
    starts = {
        "ours": run(PYTHON, str(ROOT / "scripts/lib/agent.py"), count, PROGRAM),
        "torchrun": run(PYTHON, "-m", "torch.distributed.run", count, PROGRAM),
        "by hand, `&`": by_hand(nproc),
    }
    if deepspeed is not None:
        options = ["--num_accelerators", str(nproc), "--master_port", "29612", "--no_local_rank"]
        starts["DeepSpeed"] = run(str(deepspeed), *options, PROGRAM)

    def measure(start: Start) -> Measure:
        return lambda: time_first_step(start, nproc)

    return {name: measure(start) for name, start in starts.items()}


def time_first_step(start: Start, nproc: int) -> float:
    """Run a launcher to its end; seconds from its start to the last rank's first step."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        start({**os.environ, "FIRST_STEP": folder, "OMP_NUM_THREADS": "1"})
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(nproc)) - began


def run(*command: str) -> Start:
    return lambda environment: subprocess.run(
        command, env=environment, check=True, capture_output=True
    )


def by_hand(nproc: int) -> Start:
    """What a shell's `&` does: every rank started at once, each importing torch itself."""

    def start(environment: dict[str, str]) -> None:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "WORLD_SIZE": str(nproc)}
        ranks = [
            subprocess.Popen([PYTHON, PROGRAM], env={**environment, **world, "RANK": str(rank)})
            for rank in range(nproc)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError(f"ranks started by hand ended with {codes}")

    return start


def time_import(modules: str) -> float:
    began = time.time()
    subprocess.run([PYTHON, "-c", f"import {modules}"], check=True)
    return time.time() - began


if __name__ == "__main__":
    main()
