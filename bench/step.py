"""Compare the step time of train.py's loop (logging included) and a bare loop: `make bench-step`.

python bench/step.py [LAUNCHES]: both train the same model on the same text, with the same strategy
and single-threaded processes. They are started together and take turns of BLOCK steps; each block
of train.py is compared with the mean of the bare loop's blocks before and after it. What is timed
is the wall-clock time of a block, so everything between two steps of train.py counts: data, logs,
heartbeat. Both are launched LAUNCHES times (default 3). Also measures the time from train.py's last
step to the prompt, which includes the checkpoint and the picture.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from harness import (
    AGENT,
    CONFIG,
    ROOT,
    beside,
    pair,
    pair_head,
    render,
    spread,
    times_or,
    write_section,
)
from turns import BLOCK, NAMES, give_turn, read_times

WARM_UP, BLOCKS = 2, 10  # per launch and program; one more block is not used
STEPS = (WARM_UP + BLOCKS + 1) * BLOCK
SAMPLES = 32  # per step, over all processes
TARGETS = {"ddp": 1.02}  # for the others, 1.03


@dataclass(frozen=True)
class Case:
    """A strategy, as settings of train.py and as variables of bare_loop.py."""

    name: str
    ranks: int
    strategy: str
    settings: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


FSDP = "distributed.strategy=fsdp"
AGAIN = "train.activation_checkpointing=full"
CASES = (
    Case("ddp", 2, "ddp"),
    Case("single", 1, "single"),
    Case("ddp, 2 micro-batches", 2, "ddp", ("train.grad_accumulation=2",), {"ACCUMULATE": "2"}),
    Case("ddp, activations computed again", 2, "ddp", (AGAIN,), {"RECOMPUTE": "1"}),
    Case("ddp, compiled", 2, "ddp", ("train.compile=true",), {"COMPILE": "1"}),
    Case("fsdp", 2, "fsdp", (FSDP,)),
    Case("fsdp in groups of 2", 4, "fsdp by 2", (FSDP, "distributed.fsdp.shard=2")),
)


@dataclass
class Found:
    """Seconds per step in each block; seconds from train.py's last step to its launcher's exit."""

    ours: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


def main() -> None:
    launches = times_or(3)
    rows, ends = [], []
    with tempfile.TemporaryDirectory() as cache:  # of compiled code
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for case in CASES:
            found = Found()
            for _ in range(launches):
                launch(case, found)
            ends += found.ends
            cells = pair(found.ours, found.bare, found.ratios, TARGETS.get(case.name, 1.03))
            rows.append([case.name, str(case.ranks), *cells])
            print(" ".join(rows[-1]), file=sys.stderr)
    head = ["strategy", "processes", *pair_head("train.py, ms", "bare loop, ms")]
    about = f", medians of {launches * BLOCKS} blocks of {BLOCK} steps, in {launches} launches"
    middle, least_and_most = spread(ends)
    end = f"From train.py's last step to the prompt: {middle} s ({least_and_most})."
    write_section("step", about, render(head, rows), end)


def launch(case: Case, found: Found) -> None:
    """Run both programs, which take turns, until they end; add the measurements."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for pipe in NAMES:
            os.mkfifo(folder / pipe)
        with (folder / NAMES[0]).open("r+b", 0) as first:
            give_turn(first, case.ranks)
            ended = run_both(bare_command(case), train_command(case, folder), folder)
        ours, bare = (read_times(folder, name)[WARM_UP:] for name in ("ours", "bare"))
        metrics = (folder / "step/metrics.jsonl").read_text().splitlines()
    found.ratios += beside(ours, bare)
    found.ours += ours
    found.bare += bare
    found.ends.append(ended - json.loads(metrics[-1])["time"])


def run_both(bare: list[str], ours: list[str], folder: Path) -> float:
    """Return when ours exited, in seconds since the epoch; bare exits first."""
    both = []
    try:
        for name, command in zip(NAMES, (bare, ours), strict=True):
            given = {**os.environ, "PYTHONPATH": str(ROOT), "TURNS": str(folder), "PROGRAM": name}
            with (folder / f"{name}.log").open("w") as out:
                both.append(subprocess.Popen(command, env=given, stdout=out, stderr=out))
        while all(each.poll() is None for each in both):  # if one exits, the other waits forever
            time.sleep(0.1)
        if both[0].poll() == 0:
            both[1].wait()
        ended = time.time()
        for name, each in zip(NAMES, both, strict=True):
            if each.poll():
                raise RuntimeError((folder / f"{name}.log").read_text())
        return ended
    finally:
        for each in both:
            each.terminate()
            each.wait()


def train_command(case: Case, folder: Path) -> list[str]:
    settings = [f"train.max_steps={STEPS}", f"train.log_every={BLOCK}", "train.eval_every=0"]
    settings += ["checkpoint.every=0", f"checkpoint.dir={folder}/checkpoints", *case.settings]
    script = [str(ROOT / "bench/step_turns.py"), "--config", CONFIG, *settings]
    return [*agent(case), "--log-dir", str(folder), "--rdzv-id", "step", *script]


def bare_command(case: Case) -> list[str]:
    given = {"STEPS": STEPS, "SAMPLES": SAMPLES, "CONFIG": CONFIG, "STRATEGY": case.strategy}
    given |= {"ACCUMULATE": "1", **case.variables}
    words = [f"{name}={value}" for name, value in given.items()]
    return ["env", *words, *agent(case), str(ROOT / "bench/bare_loop.py")]


def agent(case: Case) -> list[str]:
    return [*AGENT, f"--nproc-per-node={case.ranks}"]


if __name__ == "__main__":
    main()
