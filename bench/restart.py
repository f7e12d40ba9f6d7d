"""A killed rank to training again, side by side: `make bench-restart`, or
python bench/restart.py [RUNS].

One node trains a small DDP model; once it runs steadily, rank 1 is killed with SIGKILL. Seconds
from there to the end of the first step that all ranks have done after the restart, without loading
a checkpoint. All launchers run in turn, RUNS times (default 7), in one go: medians compare.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from subprocess import DEVNULL
from typing import NamedTuple

from table import describe_machine, render, write_section
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = str(ROOT / "bench/restart_step.py")
PROCESSES = (2, 4)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCHERS = {
    "ours": [sys.executable, str(ROOT / "scripts/lib/agent.py")],
    "torchrun": TORCHRUN,
    "torchrun, looking 10 times as often": [*TORCHRUN, "--monitor-interval=0.01"],
}
VICTIM = 1
STEADY = 50  # steps
LIMIT_S = 60.0  # a run that has not got on by then hangs
TRIES = 10
TARGET = 0.5


class Step(NamedTuple):
    """A step that restart_step.py has noted."""

    pid: int
    time: float  # in seconds since the epoch, at the step's end


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    rows = []
    for nproc in PROCESSES:
        times: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
        failed = dict.fromkeys(LAUNCHERS, 0)
        for number in range(runs + 1):
            for name, launcher in LAUNCHERS.items():
                seconds, failures = time_restart(launcher, nproc)
                failed[name] += failures
                if number > 0:  # the first round only warms the caches
                    times[name].append(seconds)
        rows += [[*summarise(nproc, name, times), str(failed[name])] for name in LAUNCHERS]
    head = ["processes", "launcher", "median s", "min-max s", "x torchrun", "failed"]
    text = (
        f"{describe_machine('make bench-restart')}, medians of {runs}\n\n{render(head, rows)}\n\n"
        f"Ours: at most {TARGET} x torchrun, which looks at its ranks every"
        f" {default_interval()} s (`--monitor-interval`) unless told otherwise. Failed: restarts"
        f" after which the run ended or had no step in {LIMIT_S:.0f} s; they were tried again, and"
        " are not in the figures."
    )
    write_section("restart", text)


def summarise(nproc: int, name: str, times: dict[str, list[float]]) -> list[str]:
    middle = {each: statistics.median(seconds) for each, seconds in times.items()}
    return [
        str(nproc),
        name,
        f"{middle[name]:.2f}",
        f"{min(times[name]):.2f}-{max(times[name]):.2f}",
        f"{middle[name] / middle['torchrun']:.2f}",
    ]


def time_restart(launcher: list[str], nproc: int) -> tuple[float, int]:
    """Return the seconds that a restart took, and how many failed before one did not."""
    for failed in range(TRIES):
        seconds = try_restart(launcher, nproc)
        if seconds is not None:
            return seconds, failed
    sys.exit(f"{' '.join(launcher)}: {TRIES} restarts have failed in a row")


def try_restart(launcher: list[str], nproc: int) -> float | None:
    """Seconds from the kill to the last rank's next step; None: it did not come to that."""
    command = [*launcher, f"--nproc-per-node={nproc}", "--max-restarts=1", PROGRAM]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "steps")
        file.touch()
        environment = {**os.environ, "STEPS_FILE": str(file), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, stdout=DEVNULL, stderr=DEVNULL) as launched:
            before = wait_for_steps(launched, file, 0, nproc, STEADY)
            if before is None:
                raise RuntimeError(f"no steady run of {' '.join(command)}")
            killed = time.time()
            os.kill(before[VICTIM][0].pid, signal.SIGKILL)
            after = wait_for_steps(launched, file, 1, nproc, 1)
            if after is None:
                launched.terminate()
    return max(steps[0].time for steps in after.values()) - killed if after else None


def wait_for_steps(
    launched: subprocess.Popen[bytes], file: Path, attempt: int, nproc: int, count: int
) -> dict[int, list[Step]] | None:
    """Wait until each rank has done that many steps of an attempt; returns them by rank.

    Returns None where the launcher ended before, or has hung.
    """
    end = time.time() + LIMIT_S
    while time.time() < end:
        has_ended = launched.poll() is not None
        done: dict[int, list[Step]] = {rank: [] for rank in range(nproc)}
        for line in file.read_text().split("\n")[:-1]:
            rank, of_attempt, pid, at = line.split()
            if int(of_attempt) == attempt:
                done[int(rank)].append(Step(int(pid), float(at)))
        if all(len(steps) >= count for steps in done.values()):
            return done
        if has_ended:
            return None
        time.sleep(0.02)
    return None


def default_interval() -> float:
    """Seconds between two looks of torchrun's agent at its ranks."""
    return float(get_args_parser().get_default("monitor_interval"))


if __name__ == "__main__":
    main()
