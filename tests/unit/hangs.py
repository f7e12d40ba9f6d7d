"""Which rank hangs, in scripts that know nothing of this project, for `make prove`.

In each run one of three ranks, drawn at random, sleeps for ever at a step that is drawn, too;
HANG_SECONDS ends the run. Whether the failure block names that rank, and its step.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys

import others
from agents import PATIENCE_S, ROOT
from harness import render

LOOPS = str(ROOT / "tests/unit/own_loops.py")
RANKS = 3
# -> what own_loops.py is given, optimizer steps for each of its steps, and HANG_SECONDS, which is
# longer than the start, on a busy machine too; an import alone takes 10 s there.
KINDS = {
    "plain DDP, in its data": ("plain data", 1, 5),
    "plain DDP, in a validation on one rank": ("plain validation", 1, 5),
    "gradient accumulation of 8": ("accumulated data", 1, 5),
    "two optimizers, one making two steps": ("two data", 2, 5),
    "accelerate": ("accelerate data", 1, 30),
    "Lightning": ("lightning data", 1, 30),
}


def prove_hangs(times: int) -> tuple[str, bool]:
    python = str(others.environment("shapes", ["accelerate", "lightning"]))
    rows, named = [], 0
    for what, (words, steps, limit_s) in KINDS.items():
        kind, where = words.split()
        found = [hang(python, kind, where, steps, limit_s) for _ in range(times)]
        ranks, named_steps, seconds = zip(*found, strict=True)
        late = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})"
        rows.append([what, f"{sum(ranks)} of {times}", f"{sum(named_steps)} of {times}", late])
        named += sum(ranks) + sum(named_steps)
    head = ["script", "rank named", "step named", "s from the last step to the end (max)"]
    text = "One of three ranks sleeps for ever at a random step; `HANG_SECONDS` is 5 or 30"
    return f"{text}\n\n{render(head, rows)}", named == 2 * times * len(KINDS)


def hang(python: str, kind: str, where: str, steps: int, limit_s: int) -> tuple[bool, bool, float]:
    """Return whether the rank and its step were named, and how long after its last step."""
    rank, step = random.randrange(RANKS), random.randrange(3, 60)
    agent = [python, str(ROOT / "scripts/lib/agent.py"), f"--nproc-per-node={RANKS}"]
    environ = {**os.environ, "HANG_SECONDS": str(limit_s), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*agent, LOOPS, kind, str(step), str(rank), where],
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    silence = re.search(r"no sign of life for (\d+) s", run.stderr)
    block = re.search(r"^FAILED   rank (\d+) .*, at step (\d+) ", run.stderr, re.M)
    if silence is None or block is None:
        print(run.stderr, file=sys.stderr)
        return False, False, float("nan")
    done = step * steps + (where == "validation")
    return int(block[1]) == rank, int(block[2]) == done, float(silence[1])
