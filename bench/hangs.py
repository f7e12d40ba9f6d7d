"""Which rank hangs, in scripts that know nothing of this project: `make bench-hangs`.

Or python bench/hangs.py [RUNS]. In each run one of three ranks, drawn at random, sleeps for ever at
a step that is drawn, too; HANG_SECONDS ends the run. Whether the failure block names that rank, and
its step.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

import others
from table import describe_machine, render, write_section

ROOT = Path(__file__).resolve().parents[1]
LOOPS = str(ROOT / "tests/unit/own_loops.py")
RANKS, LIMIT_S = 3, 3
KINDS = {  # -> what own_loops.py is given, optimizer steps for each of its steps
    "plain DDP, in its data": ("plain data", 1),
    "plain DDP, in a validation on one rank": ("plain validation", 1),
    "gradient accumulation of 8": ("accumulated data", 1),
    "two optimizers, one making two steps": ("two data", 2),
    "accelerate": ("accelerate data", 1),
    "Lightning": ("lightning data", 1),
}


def main() -> None:
    """Measure, and write the table."""
    runs = int(sys.argv[1]) if sys.argv[1:] else 20
    python = str(others.environment("shapes", ["accelerate", "lightning"]))
    rows = []
    for what, (words, steps) in KINDS.items():
        kind, where = words.split()
        found = [hang(python, kind, where, steps) for _ in range(runs)]
        ranks, named_steps, seconds = zip(*found, strict=True)
        late = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})"
        rows.append([what, f"{sum(ranks)} of {runs}", f"{sum(named_steps)} of {runs}", late])
        print(*rows[-1], file=sys.stderr)
    head = ["script", "rank named", "step named", "s from the last step to the end (max)"]
    text = f"{describe_machine('make bench-hangs')}\n\n{render(head, rows)}"
    write_section("hangs", text)


def hang(python: str, kind: str, where: str, steps: int) -> tuple[bool, bool, float]:
    """Return whether the rank and its step were named, and how long after its last step."""
    rank, step = random.randrange(RANKS), random.randrange(3, 60)
    agent = [python, str(ROOT / "scripts/lib/agent.py"), f"--nproc-per-node={RANKS}"]
    environ = {**os.environ, "HANG_SECONDS": str(LIMIT_S), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*agent, LOOPS, kind, str(step), str(rank), where],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    silence = re.search(r"no sign of life for (\d+) s", run.stderr)
    block = re.search(r"^FAILED   rank (\d+) .*, at step (\d+) ", run.stderr, re.M)
    if silence is None or block is None:
        print(run.stderr, file=sys.stderr)
        return False, False, float("nan")
    done = step * steps + (where == "validation")
    return int(block[1]) == rank, int(block[2]) == done, float(silence[1])


if __name__ == "__main__":
    main()
