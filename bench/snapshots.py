"""What snapshots in memory cost and save: `make bench-snapshots`, or
python bench/snapshots.py [TIMES].

train.py runs on 2 ranks, with a snapshot every 5 steps. The cost per step is measured in blocks of
20 steps of one run, which are alternately without and with snapshots; each block with snapshots is
compared with the mean of its two neighbours. To measure the savings, rank 1 of a run with a
checkpoint every 50 steps is killed with SIGKILL after step 95, TIMES times (default 7). What counts
is how many steps are repeated, and how many seconds pass until a new step is done. torchrun
restarts the same train.py from the same checkpoints.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from harness import (
    AGENT,
    CONFIG,
    ROOT,
    beside,
    in_turns,
    pair,
    pair_head,
    render,
    run,
    times_or,
    write_section,
)
from restart import OWN_STORE

EVERY = "checkpoint.snapshot_every=5"
KILL_AFTER = 95  # steps
BLOCK = 20  # steps
PAIRS_A_TIME = 4
SHARED = ("distributed.strategy=fsdp", "checkpoint.format=sharded")
LAUNCHERS = {
    "ours, with snapshots": ([*AGENT, "--max-restarts=1"], [EVERY]),
    "ours": ([*AGENT, "--max-restarts=1"], []),
    "torchrun": ([*OWN_STORE, "--standalone", "--max-restarts=1"], []),
}
LIMIT_S = 120.0


def main() -> None:
    times = times_or(7)
    pairs = PAIRS_A_TIME * times
    costs = [cost(name, settings, pairs) for name, settings in (("full", ()), ("sharded", SHARED))]
    head = ["checkpoint.format", *pair_head("without, ms a step", "with, ms a step")]
    kills = in_turns(
        {name: functools.partial(kill_once, *given) for name, given in LAUNCHERS.items()}, times
    )
    rows = []
    for name, found in kills.items():
        steps, seconds = (statistics.median(each) for each in zip(*found, strict=True))
        rows.append([name, f"{steps:.0f}", f"{seconds:.2f}"])
    write_section(
        "snapshots",
        f", medians of {pairs} blocks of {BLOCK} steps",
        render(head, costs),
        f"kill -9 of a rank after step {KILL_AFTER}, medians of {times}",
        render(["launcher", "steps repeated", "seconds until they are repeated"], rows),
    )


def cost(name: str, settings: tuple[str, ...], pairs: int) -> list[str]:
    """Return a row: a step's time in the blocks without snapshots and in those with them."""
    with tempfile.TemporaryDirectory() as folder:
        last = f"train.max_steps={BLOCK * (2 * pairs + 3)}"
        chosen = [EVERY, last, "train.eval_every=0", *settings]
        chosen += ["checkpoint.every=0", f"checkpoint.dir={folder}/checkpoints"]
        script = [ROOT / "bench/snapshot_steps.py", "--config", CONFIG, *chosen]
        command = [*AGENT, "--nproc-per-node=2", "--log-dir", folder, *script]
        blocks = Path(folder, "blocks")
        run(*command, BLOCK=str(BLOCK), BLOCKS_FILE=str(blocks))
        began = json.loads(blocks.read_text())[1:]  # the first block warms up
    steps = [(end - start) / BLOCK for start, end in itertools.pairwise(began)]
    without, with_them = steps[::2], steps[1::2]
    return [name, *pair(without, with_them, beside(with_them, without), 1.02)]


def kill_once(launcher: list[str], settings: list[str]) -> tuple[int, float]:
    """Return the number of steps repeated after a kill, and the seconds until a new step."""
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
    """Wait until a step is done; returns the time when it was done."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for step, at in read(metrics):
            if step >= wanted and at > after:
                return at
        time.sleep(0.02)
    raise TimeoutError(f"step {wanted} was not done within {LIMIT_S:g} s")


def read(metrics: Path) -> list[tuple[int, float]]:
    """Return the steps done so far, and when each was done, in seconds since the epoch."""
    text = metrics.read_text() if metrics.exists() else ""
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    return [(line["step"], line["time"]) for line in lines]


def rank_1_below(launcher: int) -> int:
    """Return the process id of rank 1: among processes without children, the second to start."""
    pending, last = [launcher], []
    while pending:
        pid = pending.pop()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pending += map(int, children)
        last += [] if children else [pid]
    return sorted(last)[1]


if __name__ == "__main__":
    main()
