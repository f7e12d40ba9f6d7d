"""Measure one GPU's speed in training loops, in at most 9 minutes: `make bench-gpu`.

PYTHONPATH=. python bench/gpu.py trains GPT-2 124M (config/gpt2_124m.yaml) on random tokens in turn
in train.py, in a bare loop, in that loop under DDP and FSDP2 with one rank, and in the loops of
accelerate and Lightning (`pip install accelerate lightning` first). `make test-gpu` tests the rest.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_runs import GPT2_CONFIG, HAS_GPU, Failed, Machine
from harness import render, write_section

OTHERS = ("bare", "ddp", "fsdp", "accelerate", "lightning")  # loops of gpu_loops.py
PACKAGES = ("accelerate", "lightning")
ROUNDS = 2
LIMIT_S = 540.0  # for everything
STEPS, FROM_STEP = 120, 40


def time_train(machine: Machine, number: int) -> dict[str, float]:
    """Return train.py's measurements; `share` is the MFU divided by the tokens per second."""
    settings = [f"train.max_steps={STEPS}", "train.log_every=10", "train.eval_every=0"]
    settings += ["checkpoint.every=0", *machine.gpt2_settings()]
    metrics = machine.train(f"speed-{number}", *settings, config=GPT2_CONFIG)
    lines = [line for line in metrics if line["step"] > FROM_STEP]
    speed = statistics.harmonic_mean([line["tokens_per_second"] for line in lines])
    share = lines[-1].get("mfu", 0.0) / lines[-1]["tokens_per_second"]
    return {"tokens_per_second": speed, "memory_gb": lines[-1]["peak_memory_gb"], "share": share}


def time_other(machine: Machine, loop: str, _number: int) -> dict[str, float]:
    if loop in PACKAGES and importlib.util.find_spec(loop) is None:
        raise Failed("not installed")
    return machine.loop(loop, STEPS, FROM_STEP)


def compare_loops(machine: Machine) -> str:
    """Return the table of all loops; the row of a loop that fails says so."""
    loops: dict[str, Callable[[int], dict[str, float]]] = {
        "train.py": functools.partial(time_train, machine)
    }
    loops |= {name: functools.partial(time_other, machine, name) for name in OTHERS}
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in loops}
    failed: dict[str, str] = {}
    for number in range(ROUNDS):
        for name, time_loop in loops.items():
            try:
                seen[name].append(time_loop(number))
            except Failed as failure:
                failed[name] = str(failure)
            print(name, seen[name][-1:] or failed[name], flush=True)
    share = max((one["share"] for one in seen["train.py"]), default=0.0)
    rows = []
    for name, found in seen.items():
        if not found:
            rows.append([name, failed[name], "", ""])
            continue
        speed = statistics.median(one["tokens_per_second"] for one in found)
        memory = statistics.median(one["memory_gb"] for one in found)
        mfu = f"{100 * share * speed:.1f} %" if share else "not known"
        rows.append([name, f"{speed:,.0f}", mfu, f"{memory:.1f}"])
    return render(["loop", "tokens per second", "MFU", "peak memory, GB"], rows)


def main() -> None:
    """Measure, and write the table."""
    if not HAS_GPU:
        sys.exit("bench/gpu.py: torch sees no GPU here; run it on a machine with one")
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", ignore_cleanup_errors=True) as name:
        table = compare_loops(Machine(Path(name), LIMIT_S))
    about = f", {torch.cuda.get_device_name()}, torch {torch.__version__}"
    write_section("gpu", about, table)


if __name__ == "__main__":
    main()
