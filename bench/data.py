"""A start with 2 GB of text against one with 20 MB: `make bench-data`.

Or python bench/data.py [ROUNDS].

Two ranks train 20 steps on folders of files of 1 MB, in turns. Seconds from the launch to the end
of the first step, and the most memory of a rank.
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
SIZES = {"20 MB": 20, "2 GB": 2000}  # files
FILE_BYTES = 10**6
SETTINGS = ["train.max_steps=20", "train.log_every=20", "train.eval_every=0", "checkpoint.every=0"]


def main() -> None:
    """Measure, and write the table."""
    rounds = int(sys.argv[1]) if sys.argv[1:] else 5
    seconds: dict[str, list[float]] = {size: [] for size in SIZES}
    memory: dict[str, list[float]] = {size: [] for size in SIZES}
    with tempfile.TemporaryDirectory(prefix="bench-data-") as name:
        folder = Path(name)
        text = " ".join(f"line {number}\n" for number in range(FILE_BYTES // 8))[:FILE_BYTES]
        for size, files in SIZES.items():
            (folder / size).mkdir()
            for number in range(files):
                (folder / size / f"{number}.txt").write_text(text)
        for number in range(rounds):
            for size in SIZES:
                start_s, most = start(folder, size, f"{number}-{size}".replace(" ", "-"))
                seconds[size].append(start_s)
                memory[size].append(most)
    rows = [
        [
            size,
            f"{statistics.median(seconds[size]):.2f}",
            f"{min(seconds[size]):.2f}-{max(seconds[size]):.2f}",
            f"{1000 * statistics.median(memory[size]):.0f}",
        ]
        for size in SIZES
    ]
    ratio = statistics.median(
        large / small for small, large in zip(seconds["20 MB"], seconds["2 GB"], strict=True)
    )
    more = 1000 * (statistics.median(memory["2 GB"]) - statistics.median(memory["20 MB"]))
    table = render(["text", "median s", "min-max s", "memory of a rank, MB"], rows)
    write_section(
        "data",
        f"{describe_machine('make bench-data')}, {rounds} rounds\n\n{table}\n\n"
        f"2 GB against 20 MB: {ratio:.2f}x the time (at most 1.2), {more:+.0f} MB (at most 100).",
    )


def start(folder: Path, size: str, run_id: str) -> tuple[float, float]:
    """Return the seconds to the end of the first step, and the most GB that a rank used."""
    environ = {**os.environ, "RUN_ID": run_id, "LOG_DIR": str(folder / "logs")}
    environ |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    data = [f"data.path={folder / size}", f"checkpoint.dir={folder / 'checkpoints'}"]
    script = str(ROOT / "scripts/ssh/launch_singlenode.sh")
    began = time.time()
    command = [script, str(ROOT / "config/local3.yaml"), "2", *data, *SETTINGS]
    subprocess.run(command, env=environ, check=True, capture_output=True)
    lines = (folder / "logs" / run_id / "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    return first["time"] - began, last["peak_memory_gb"]


if __name__ == "__main__":
    main()
