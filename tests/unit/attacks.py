"""Attacks for `make prove`: at the ports of a run, on checkpoints, on the clean-up."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import pytest
from agents import kill_what_is_left
from table import render
from test_checkpoint import flip_old_ones
from test_clean_up import VICTIMS, hit, start_run
from test_strangers import attack_a_run

LIMITS: dict[str, tuple[int, int]] = {  # of open files, soft and hard
    "as it is": resource.getrlimit(resource.RLIMIT_NOFILE),
    "128 open files": (128, 128),
}


def prove_attacks(times: int) -> tuple[str, bool]:
    """Attack with 50 * times byte sequences and messages, and end runs in each way."""
    parts = [prove_strangers(50 * times, 100 * times), prove_flips(), prove_clean_up(times)]
    parts.append(prove_inputs())
    return "Attacks\n\n" + "\n\n".join(text for text, _ in parts), all(kept for _, kept in parts)


def prove_strangers(number: int, silent: int) -> tuple[str, bool]:
    """Attack every port of a run of two nodes, while it waits and while it runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * silent + 1024), hard))
    outcome = "none joined, ended or changed the run"
    with tempfile.TemporaryDirectory() as folder:
        try:
            attack_a_run(Path(folder), times=number, silent=silent)
        except AssertionError as error:
            outcome = f"FAILED: {str(error).splitlines()[0]}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    sent = f"{number} random byte sequences, {number} mutated messages, {silent} silent connections"
    text = f"At the port of a run of two nodes, while it waits and again while it runs: {sent}"
    return f"{text}: {outcome}.", outcome.startswith("none")


def prove_flips() -> tuple[str, bool]:
    """Flip a bit in every byte of what describes an old checkpoint."""
    number, failed = 0, ""
    for file in ("manifest.json", "progress.json"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                number += flip_old_ones(Path(folder), file, every=1)
            except (AssertionError, pytest.fail.Exception) as error:
                failed = f"FAILED in {file}: {error}"
    what = f"{number} flips, one in every byte of an old checkpoint's manifest and progress file"
    return (
        f"{what}, each followed by two saves: {failed or 'all named, no save failed'}.",
        not failed,
    )


def prove_clean_up(times: int) -> tuple[str, bool]:
    """Kill and stop guardian and agent, with ranks that fork twice."""
    rows = []
    for name, limits in LIMITS.items():
        for victim in VICTIMS:
            left, seconds = 0, []
            for _ in range(max(1, times // len(LIMITS) // 2)):
                took, remaining = end_once(victim, limits)
                left += remaining
                seconds.append(took)
            rows.append([victim, name, str(len(seconds)), str(left), f"{max(seconds):.2f}"])
    head = ["kill -9 of", "limits", "times", "processes left", "gone after, max s"]
    text = f"Two ranks that have forked twice each\n\n{render(head, rows)}"
    return text, all(row[3] == "0" for row in rows)


def end_once(victim: str, limits: tuple[int, int]) -> tuple[float, int]:
    """Return how long it took until all was gone, and how many were left after 10 s."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with tempfile.TemporaryDirectory() as folder:
        if limits != before:
            resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE, (limits[0], before[1]))
        run = start_run(Path(folder))
        resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE, before)
        began = time.monotonic()
        hit(run, victim)
        while run.survivors() and time.monotonic() < began + 10:
            time.sleep(0.005)
        took, left = time.monotonic() - began, len(run.survivors())
        kill_what_is_left([run])
    return took, left


def prove_inputs() -> tuple[str, bool]:
    """Try 10,000 environments and as many settings: each gives a place or a value, or one line."""
    files = [
        str(Path(__file__).with_name(f"test_{name}.py")) for name in ("environment", "settings")
    ]
    code = pytest.main(["-q", "--hypothesis-profile=prove", "-k", "any_", *files])
    kept = "each gave a place or a value, or one line" if code == 0 else "FAILED"
    return f"10,000 environments and 10,000 settings: {kept}.", code == 0


if __name__ == "__main__":
    print(prove_attacks(int(sys.argv[1]))[0])
