"""What snapshots in memory cost and save: `make bench-snapshots`, or
python bench/snapshots.py [PAIRS].

train.py on 2 ranks, with a snapshot every 5 steps. The cost: seconds per step beside the same run
without snapshots, in turn, PAIRS times (default 7). What they save: rank 1 is killed with SIGKILL
after step 95, with a checkpoint every 50 steps; the steps that are done again, and the seconds
until the run is further than it was. torchrun restarts the same train.py from the same checkpoints.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from restart import AGENT, OWN_STORE
from step import CONFIG, ROOT, Case, time_train
from table import describe_machine, render, write_section

EVERY = "checkpoint.snapshot_every=5"
KILL_AFTER = 95  # steps
SHARED = ("distributed.strategy=fsdp", "checkpoint.format=sharded")
LAUNCHERS = {
    "ours, with snapshots": ([*AGENT, "--max-restarts=1"], [EVERY]),
    "ours": ([*AGENT, "--max-restarts=1"], []),
    "torchrun": ([*OWN_STORE, "--standalone", "--max-restarts=1"], []),
}
LIMIT_S = 120.0


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    costs = [cost(name, settings, pairs) for name, settings in (("full", ()), ("sharded", SHARED))]
    head = ["checkpoint.format", "without, ms a step", "with, ms a step", "ratio", "at most"]
    text = f"{describe_machine('make bench-snapshots')}, medians of {pairs}\n\n"
    text += f"{render(head, costs)}\n\n"
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in LAUNCHERS}
    for _ in range(pairs):
        for name, (launcher, settings) in LAUNCHERS.items():
            found[name].append(kill_once(launcher, settings))
    rows = [
        [
            name,
            f"{statistics.median(steps for steps, _ in times):.0f}",
            f"{statistics.median(seconds for _, seconds in times):.2f}",
        ]
        for name, times in found.items()
    ]
    head = ["launcher", "steps done again", "seconds until further than before"]
    write_section(
        "snapshots", f"{text}kill -9 of a rank after step {KILL_AFTER}\n\n{render(head, rows)}"
    )


def cost(name: str, settings: tuple[str, ...], pairs: int) -> list[str]:
    plain, taking = (Case(name, 2, "", (*settings, *more)) for more in ((), (EVERY,)))
    times: list[tuple[float, float]] = []
    for number in range(pairs):
        turn = 1 - 2 * (number % 2)  # which of them is first
        without, with_them = [time_train(case)[0] for case in (plain, taking)[::turn]][::turn]
        times.append((without, with_them))
    ratio = statistics.median(b / a for a, b in times)
    each = [f"{1000 * statistics.median(one):.1f}" for one in zip(*times, strict=True)]
    return [name, *each, f"{ratio:.3f}", "1.02"]


def kill_once(launcher: list[str], settings: list[str]) -> tuple[int, float]:
    """Return the steps that are done again after a kill, and the seconds until one is new."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = [f"checkpoint.dir={folder}", "checkpoint.every=50", "train.log_every=1", *settings]
        script = [str(ROOT / "train.py"), "--config", CONFIG, *chosen, "train.max_steps=140"]
        run = subprocess.Popen(
            [*launcher, "--nproc-per-node=2", *script],
            env={**os.environ, "RUN_ID": "killed", "LOG_DIR": folder, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        metrics = Path(folder, "killed/metrics.jsonl")
        wait_for_step(metrics, KILL_AFTER)
        os.kill(rank_1_below(run.pid), signal.SIGKILL)
        killed = time.time()
        reached = max(step for step, _ in read(metrics))
        further = wait_for_step(metrics, reached + 1, after=killed)
        output = run.communicate(timeout=LIMIT_S)[0]
        (resumed,) = re.findall(r"resumed +after step (\d+)", output) or ["0"]
        return reached - int(resumed), further - killed


def wait_for_step(metrics: Path, wanted: int, after: float = 0.0) -> float:
    """Wait until that step is done; returns when it was."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for step, at in read(metrics):
            if step >= wanted and at > after:
                return at
        time.sleep(0.02)
    raise TimeoutError(f"step {wanted} was not done within {LIMIT_S:g} s")


def read(metrics: Path) -> list[tuple[int, float]]:
    """Return the steps done so far, and when each was, in seconds since the epoch."""
    text = metrics.read_text() if metrics.exists() else ""
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    return [(line["step"], line["time"]) for line in lines]


def rank_1_below(launcher: int) -> int:
    """Return the process id of rank 1: of the processes without children, the second to start."""
    pending, last = [launcher], []
    while pending:
        pid = pending.pop()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pending += map(int, children)
        last += [] if children else [pid]
    return sorted(last)[1]


if __name__ == "__main__":
    main()
