"""Step time of train.py's loop with its logging on, against a bare loop: `make bench-step`.

python bench/step.py [PAIRS]: both train the same model on the same text with 2 processes of one
thread each, in turn, PAIRS times (default 7). Seconds per step are taken over the same steps from
the clock alone, so that all that train.py does between two steps counts: data, logs, heartbeat. And
how long it takes from train.py's last step, over its checkpoint and picture, to the prompt.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import describe_machine, render, write_section

ROOT = Path(__file__).resolve().parents[1]
CONFIG = str(ROOT / "config/local3.yaml")
AGENT = [sys.executable, str(ROOT / "scripts/lib/agent.py"), "--nproc-per-node=2"]
STEPS = 120
FROM_STEP = 20  # what comes before only warms up
BATCH = 16  # samples per process
TARGET = 1.02


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    times: dict[str, list[float]] = {"train.py": [], "bare loop": []}
    ends = []
    for _ in range(pairs):
        step_s, end_s = time_train()
        times["train.py"].append(step_s)
        ends.append(end_s)
        times["bare loop"].append(time_bare())
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    rows = [
        [
            name,
            f"{1000 * statistics.median(seconds):.1f}",
            f"{1000 * min(seconds):.1f}-{1000 * max(seconds):.1f}",
        ]
        for name, seconds in times.items()
    ]
    text = (
        f"{describe_machine('make bench-step')}, {pairs} pairs\n\n"
        f"{render(['loop', 'median ms per step', 'min-max ms'], rows)}\n\n"
        f"Median of the pairs' ratios: {statistics.median(ratios):.3f} (at most {TARGET}).\n\n"
        f"From train.py's last step to the prompt: {statistics.median(ends):.2f} s"
        f" ({min(ends):.2f}-{max(ends):.2f})."
    )
    write_section("step", text)


def time_train() -> tuple[float, float]:
    """Return seconds per step, and seconds from the last step to the end of the launcher."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"train.max_steps={STEPS}", "train.log_every=10", "train.eval_every=0"]
        settings += ["checkpoint.every=0", f"checkpoint.dir={folder}/checkpoints"]
        command = [*AGENT, "--log-dir", folder, "--rdzv-id", "step", str(ROOT / "train.py")]
        run([*command, "--config", CONFIG, *settings])
        ended = time.time()
        lines = Path(folder, "step/metrics.jsonl").read_text().splitlines()
    at = {line["step"]: line["time"] for line in map(json.loads, lines)}
    return (at[STEPS] - at[FROM_STEP]) / (STEPS - FROM_STEP), ended - at[STEPS]


def time_bare() -> float:
    given = {"STEPS": str(STEPS), "FROM_STEP": str(FROM_STEP), "BATCH": str(BATCH)}
    given |= {"CONFIG": CONFIG, "PYTHONPATH": str(ROOT)}
    return float(run([*AGENT, str(ROOT / "bench/bare_loop.py")], **given))


def run(command: list[str], **environment: str) -> str:
    told = subprocess.run(
        command, env={**os.environ, **environment}, check=True, capture_output=True, text=True
    )
    return told.stdout


if __name__ == "__main__":
    main()
