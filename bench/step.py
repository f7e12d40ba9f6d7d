"""Step time of train.py's loop with its logging on, against a bare loop: `make bench-step`.

python bench/step.py [PAIRS]: both train the same model on the same text, with the same strategy and
processes of one thread each, in turn, PAIRS times (default 5). Seconds per step are taken over the
same steps from the clock alone, so that all that train.py does between two steps counts: data,
logs, heartbeat. And how long it takes from train.py's last step, over its checkpoint and picture,
to the prompt.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from table import describe_machine, render, write_section

ROOT = Path(__file__).resolve().parents[1]
CONFIG = str(ROOT / "config/local3.yaml")
STEPS = 70
FROM_STEP = 20  # what comes before only warms up
SAMPLES = 32  # of a step, over all processes
TARGETS = {"ddp": 1.02}  # the others': 1.03


@dataclass(frozen=True)
class Case:
    """A strategy, by train.py's settings and by bare_loop.py's variables."""

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


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows, ends = [], []
    with tempfile.TemporaryDirectory() as cache:  # of what is compiled
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for case in CASES:
            ours, bare = [], []
            for number in range(pairs):
                if number % 2:  # either comes first in turn
                    bare.append(time_bare(case))
                step_s, end_s = time_train(case)
                ours.append(step_s)
                ends.append(end_s)
                if number % 2 == 0:
                    bare.append(time_bare(case))
            ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
            each = [f"{1000 * statistics.median(seconds):.1f}" for seconds in (ours, bare)]
            target = TARGETS.get(case.name, 1.03)
            rows.append([case.name, str(case.ranks), *each, f"{ratio:.3f}", f"{target:.2f}"])
            print(" ".join(rows[-1]), file=sys.stderr)
    head = ["strategy", "processes", "train.py, ms", "bare loop, ms", "ratio", "at most"]
    text = (
        f"{describe_machine('make bench-step')}, {pairs} pairs; medians, of the pairs' ratios, too"
        f"\n\n{render(head, rows)}\n\n"
        f"From train.py's last step to the prompt: {statistics.median(ends):.2f} s"
        f" ({min(ends):.2f}-{max(ends):.2f})."
    )
    write_section("step", text)


def time_train(case: Case) -> tuple[float, float]:
    """Return seconds per step, and seconds from the last step to the end of the launcher."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"train.max_steps={STEPS}", "train.log_every=10", "train.eval_every=0"]
        settings += ["checkpoint.every=0", f"checkpoint.dir={folder}/checkpoints", *case.settings]
        command = [*agent(case), "--log-dir", folder, "--rdzv-id", "step", str(ROOT / "train.py")]
        run([*command, "--config", CONFIG, *settings])
        ended = time.time()
        lines = Path(folder, "step/metrics.jsonl").read_text().splitlines()
    at = {line["step"]: line["time"] for line in map(json.loads, lines)}
    return (at[STEPS] - at[FROM_STEP]) / (STEPS - FROM_STEP), ended - at[STEPS]


def time_bare(case: Case) -> float:
    given = {"STEPS": str(STEPS), "FROM_STEP": str(FROM_STEP), "SAMPLES": str(SAMPLES)}
    given |= {"CONFIG": CONFIG, "PYTHONPATH": str(ROOT), "STRATEGY": case.strategy}
    given |= {"ACCUMULATE": "1", **case.variables}
    return float(run([*agent(case), str(ROOT / "bench/bare_loop.py")], **given))


def agent(case: Case) -> list[str]:
    return [sys.executable, str(ROOT / "scripts/lib/agent.py"), f"--nproc-per-node={case.ranks}"]


def run(command: list[str], **environment: str) -> str:
    told = subprocess.run(
        command, env={**os.environ, **environment}, check=True, capture_output=True, text=True
    )
    return told.stdout


if __name__ == "__main__":
    main()
