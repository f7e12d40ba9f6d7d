"""A start from an environment on a slow file system: `make bench-staging` (as root), or
python bench/staging.py [ROUNDS].

On 1 node and on 4 of a cluster in a box, over ssh, each rank imports torch and ends. Environment
and logs are on the machine's own disk, or on a file system that takes 2 ms for each operation
(slow_files.py), a mount for each host. Seconds from the launch to the end, medians; all take turns.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import others
from harness import CLUSTER, ROOT, cluster, in_turns, ratio, render, spread, times_or, write_section

NODES = [f"node{number}" for number in range(1, 5)]
COUNTS = (1, 4)
MS = 2
WAIT_S = 20.0


def on(host: str, *command: object) -> list[str]:
    """Return what runs a command on a host."""
    return [CLUSTER, "run", host, *map(str, command)]


@contextlib.contextmanager
def slow_mounts(folder: Path, mount_point: Path) -> Iterator[None]:
    """Mount the folder on every host, each for itself."""
    python = others.environment("mfusepy", ["mfusepy"])
    served = [
        subprocess.Popen(
            on(host, python, ROOT / "bench/slow_files.py", folder, mount_point, MS),
            stderr=subprocess.DEVNULL,
        )
        for host in ("login", *NODES)
    ]
    until = time.monotonic() + WAIT_S
    for host in ("login", *NODES):
        while subprocess.run(on(host, "mountpoint", "-q", mount_point)).returncode != 0:
            assert time.monotonic() < until, f"{host} has no {mount_point}"
            time.sleep(0.1)
    try:
        yield
    finally:
        for host in ("login", *NODES):
            subprocess.run(on(host, "umount", mount_point))
        for one in served:
            one.terminate()
            one.wait(WAIT_S)


def pack(folder: Path, mount_point: Path) -> None:
    """Pack the environment under the path that it will have, on the machine's own disk."""
    subprocess.run(on("login", "mount", "--bind", folder, mount_point), check=True)
    try:
        start(mount_point / "env/bin/python", mount_point, "1", nodes=[])
    finally:
        subprocess.run(on("login", "umount", mount_point), check=True)


def start(python: Path, folder: Path, stage: str, nodes: Sequence[str]) -> float:
    """Launch on the nodes, or on the login host alone; returns the seconds."""
    environ = {**os.environ, "PYTHON": str(python), "TRAIN_SCRIPT": str(folder / "imports.py")}
    environ |= {"LOG_DIR": str(folder / "logs"), "STAGE_ENV": stage}
    began = time.monotonic()
    script = "launch_torchrun_auto.sh" if nodes else "launch_singlenode.sh"
    subprocess.run(
        on("login", ROOT / "scripts/ssh" / script, "-", 1, *nodes), env=environ, check=True
    )
    return time.monotonic() - began


def measure(folder: Path, rounds: int, nodes: Sequence[str]) -> dict[str, list[float]]:
    """Return the seconds of each case, on these nodes."""

    def start_in(place: str, stage: str = "") -> float:
        return start(folder / place / "env/bin/python", folder / place, stage, nodes)

    def start_anew() -> float:
        for host in ("login", *NODES):
            subprocess.run(on(host, "rm", "-rf", f"/dev/shm/launch-kit-{os.getuid()}"), check=True)
        return start_in("slow", "1")

    cases: dict[str, Callable[[], float]] = {
        "local": lambda: start_in("fast"),
        "unstaged": lambda: start_in("slow"),
        "staged, the first time": start_anew,
        "staged, again": lambda: start_in("slow", "1"),
    }
    return in_turns(cases, rounds)


def main() -> None:
    """Measure, and write the table."""
    rounds = times_or(3)
    with tempfile.TemporaryDirectory(prefix="bench-staging-") as name:
        folder = Path(name)
        fast, slow = folder / "fast", folder / "slow"
        slow.mkdir()
        make = ["/usr/bin/python3", "-m", "venv", "--without-pip", str(fast / "env")]
        subprocess.run(make, check=True)  # of the system's Python, which is on each node
        pip = [sys.executable, "-m", "pip", "--python", str(fast / "env/bin/python"), "install"]
        wanted = ROOT / "requirements.txt"
        subprocess.run([*pip, "-qq", "--disable-pip-version-check", "-r", wanted], check=True)
        (fast / "imports.py").write_text("import torch, torch._dynamo\n")
        with cluster(len(NODES)) as is_up:
            if not is_up:
                sys.exit(1)
            pack(fast, slow)
            with slow_mounts(fast, slow):
                seconds = {number: measure(folder, rounds, NODES[:number]) for number in COUNTS}
    rows = []
    for number, cases in seconds.items():
        for case, times in cases.items():
            ratios = ratio(times, cases["local"]), ratio(cases["unstaged"], times)
            rows.append([str(number), case, spread(times, 1)[0], *(f"{one:.2f}" for one in ratios)])
    head = ["nodes", "environment", "median s", "x local", "times faster than unstaged"]
    write_section("staging", f", {rounds} rounds", render(head, rows))


if __name__ == "__main__":
    main()
