"""Rows of `make test-nccl` in which nothing fails, or a run resumes.

Each function returns what it saw, or raises Failed.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable

from gpu_runs import HAS_GPU, SELF_TEST, Ended, Failed, Machine, share_gpus
from rows import SHARDED, STEPS, hash_of, restart, stop_midway, tell
from watched import under_ours, under_torchrun

SLOW = {"slow-link", "slow-rank"}  # ranks that share a GPU wait for each other
RESTARTS = 10
MOST_KEPT = 64 << 20  # bytes that ten restarts may add


def self_test(machine: Machine, ranks: int) -> str:
    """Return the verdict, with the bandwidth; a slow rank or link is not a failure here."""
    ended = machine.run([SELF_TEST, str(ranks), "--quick"], **share_gpus(ranks))
    faults = {*re.findall(r"\[([a-z-]+)\]", " ".join(lines_of(ended, "PASS", "FAIL")))}
    if ended.code and (not faults or faults - SLOW or "wrong-result" in ended.text):
        ended.expect()
    return " ".join(lines_of(ended, "PASS", "FAIL"))


def lines_of(ended: Ended, *starts: str) -> list[str]:
    """Return the lines that begin with one of these words."""
    return [line for line in ended.text.splitlines() if line.startswith(starts)]


# --- train.py -----------------------------------------------------------------------------------


def train_once(machine: Machine, run_id: str, ranks: int, strategy: str) -> list[dict[str, float]]:
    """Train, unless another row has done so; returns the lines with a loss."""
    if lines := machine.metrics(run_id):
        return lines
    settings = [*STEPS, f"distributed.strategy={strategy}"]
    return machine.train(run_id, *settings, ranks=ranks, **share_gpus(ranks))


def train(machine: Machine, ranks: int, strategy: str) -> str:
    return tell(train_once(machine, f"{strategy}-{ranks}", ranks, strategy))


def train_twice(machine: Machine, ranks: int, strategy: str) -> str:
    """Train twice, and compare the weights."""
    told = train(machine, ranks, strategy)
    run_ids = f"{strategy}-{ranks}", f"{strategy}-{ranks}-again"
    train_once(machine, run_ids[1], ranks, strategy)
    first, second = (hash_of(machine, run_id) for run_id in run_ids)
    return f"{told}; a second run: {'the same' if first == second else 'other'} bytes"


def stop_and_resume(machine: Machine, ranks: int) -> str:
    """Compare with an uninterrupted run."""
    whole = train_once(machine, f"ddp-{ranks}", ranks, "ddp")
    at = stop_midway(machine, "stopped", ranks=ranks, **share_gpus(ranks))
    resumed = machine.train("stopped", *STEPS, ranks=ranks, **share_gpus(ranks))
    losses = whole[-1]["loss"], resumed[-1]["loss"]
    if abs(losses[0] - losses[1]) > 1e-2:
        raise Failed(f"stopped at {at}; last losses {losses}")
    is_same = hash_of(machine, f"ddp-{ranks}") == hash_of(machine, "stopped")
    return f"code 75 at {at}, resumed to {'the same' if is_same else 'other'} bytes"


def restart_ddp(machine: Machine, ranks: int) -> str:
    return restart(machine, "killed-ddp", ranks=ranks, **share_gpus(ranks))


def restart_sharded(machine: Machine, ranks: int) -> str:
    settings = SHARDED[:-1]  # restart() has the interval of the snapshots
    return restart(machine, "killed-fsdp", *settings, ranks=ranks, **share_gpus(ranks))


# --- restarts, ends, starts ---------------------------------------------------------------------


def restart_often(machine: Machine, ranks: int) -> str:
    """Kill rank 1 in each of ten attempts; what is in use must not grow."""
    file = machine.folder / "restarts.txt"
    command = under_ours(ranks, "restarts", str(file))
    machine.run(command, MAX_RESTARTS=str(RESTARTS), **share_gpus(ranks)).expect()
    lines = [line.split() for line in file.read_text().splitlines()]
    if [line[0] for line in lines] != [*map(str, range(RESTARTS + 1))]:
        raise Failed(f"attempts: {lines}")
    times, used = [float(line[1]) for line in lines], [int(line[2]) for line in lines]
    each = statistics.median(after - before for before, after in itertools.pairwise(times))
    where = "on the GPU" if HAS_GPU else "of shared memory"
    told = f"{each:.2f} s each; {used[0] >> 20} MiB {where} used at first, {used[-1] >> 20} at last"
    if used[-1] > used[0] + MOST_KEPT:
        raise Failed(told)
    return told


def end(machine: Machine, ranks: int) -> str:
    """Return the seconds from the last collective to the launcher's end."""
    told = []
    for name, how, under in (
        ("finish()", "finish", under_ours),
        ("ordinary", "ordinary", under_ours),
        ("torchrun", "ordinary", under_torchrun),
    ):
        times, over = run_timed(machine, under, ranks, "ends", how)
        told.append(f"{name} {over - max(times):.2f} s")
    return ", ".join(told)


def start(machine: Machine, ranks: int) -> str:
    """Return the seconds from the launch to the first step; each is launched once."""
    told = []
    for name, under in (("ours", under_ours), ("torchrun", under_torchrun)):
        began = time.time()
        times, _ = run_timed(machine, under, ranks, "first_step")
        told.append(f"{name} {max(times) - began:.1f} s")
    return ", ".join(told)


def run_timed(
    machine: Machine, under: Callable[..., list[str]], ranks: int, *words: str
) -> tuple[list[float], float]:
    """Run the probe; returns the time that each rank wrote, and that of the launcher's end."""
    file = machine.folder / f"{'-'.join(words)}-{ranks}-{under.__name__}.txt"
    shared = share_gpus(ranks) if under is under_ours else {}
    machine.run(under(ranks, *words, str(file)), **shared).expect()
    over = time.time()
    times = [*map(float, file.read_text().split())]
    if len(times) != ranks:
        raise Failed(f"{len(times)} of {ranks} ranks wrote a time")
    return times, over
