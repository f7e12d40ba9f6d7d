"""Attacks for `make prove`: at the ports of a run, on checkpoints, on the clean-up."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import pytest
from agents import PROMISED_S, kill_what_is_left
from harness import render
from test_checkpoint import flip_old_ones
from test_clean_up import VICTIMS, hit, start_run
from test_strangers import attack_a_run

PIDS = Path(f"/sys/fs/cgroup/pids/prove-{os.getpid()}")
NO_MORE_PROCESSES = "no process more (pids.max)"
LIMITS = {  # -> the command that becomes the agent
    "none": [],
    "128 open files": ["prlimit", "--nofile=128:128", "--"],
    NO_MORE_PROCESSES: ["sh", "-c", f'echo $$ > {PIDS}/cgroup.procs; exec "$@"', "-"],
    "hidepid=1, not root": [
        *("unshare", "--mount", "sh", "-c"),
        'mount -t proc -o hidepid=1 proc /proc; exec setpriv --reuid 65534 --clear-groups "$@"',
        "-",
    ],
}


def prove_attacks(times: int) -> tuple[str, bool]:
    """Attack with 50 * times byte sequences and messages, damaged files and wrong inputs."""
    parts = [prove_strangers(50 * times, 100 * times), prove_flips(), prove_inputs()]
    return "\n\n".join(text for text, _ in parts), all(kept for _, kept in parts)


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
                with contextlib.redirect_stderr(io.StringIO()):  # a line for each flip
                    number += flip_old_ones(Path(folder), file, every=1)
            except (AssertionError, pytest.fail.Exception) as error:
                failed = f"FAILED in {file}: {error}"
    what = f"{number} flips, one in every byte of an old checkpoint's manifest and progress file"
    return (
        f"{what}, each followed by two saves: {failed or 'all named, no save failed'}.",
        not failed,
    )


def prove_clean_up(times: int) -> tuple[str, bool]:
    """Kill and stop supervisor and agent; ranks fork twice; the machine as it is, and worse."""
    rows, limits = [], list(LIMITS)
    if not PIDS.parent.is_dir():
        limits.remove(NO_MORE_PROCESSES)
    for limit in limits:
        for victim in VICTIMS:
            ends = [end_once(victim, limit) for _ in range(-(-5 * times // 16))]
            seconds, left = max(took for took, _ in ends), sum(left for _, left in ends)
            rows.append([victim, limit, str(len(ends)), str(left), f"{seconds:.2f}"])
    head = ["kill -9 of", "limits", "times", "processes left", "gone after, max s"]
    text = f"Two ranks that have forked twice each\n\n{render(head, rows)}"
    if len(limits) < len(LIMITS):
        text += f"\n\nNot tried: {NO_MORE_PROCESSES}; this machine has no pids controller."
    return text, all(row[3] == "0" and float(row[4]) < PROMISED_S for row in rows)


def end_once(victim: str, limit: str) -> tuple[float, int]:
    """Return how long it took until all was gone, and how many were left after 10 s."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # for a user who is not root
        if limit == NO_MORE_PROCESSES:
            PIDS.mkdir()
        run = start_run(Path(folder), *LIMITS[limit])
        if limit == NO_MORE_PROCESSES:
            (PIDS / "pids.max").write_text((PIDS / "pids.current").read_text())
        began = time.monotonic()
        hit(run, victim)
        while run.survivors() and time.monotonic() < began + 10:
            time.sleep(0.005)
        took, left = time.monotonic() - began, len(run.survivors())
        kill_what_is_left([run])
        if limit == NO_MORE_PROCESSES:
            while (PIDS / "pids.current").read_text() != "0\n":  # process 1 reaps the last
                time.sleep(0.005)
            PIDS.rmdir()
    return took, left


def prove_inputs() -> tuple[str, bool]:
    """Try 10,000 environments and as many settings: each gives a place or a value, or one line."""
    files = [
        str(Path(__file__).with_name(f"test_{name}.py")) for name in ("environment", "settings")
    ]
    options = ["-q", "--hypothesis-profile=prove"]
    options += ["-o", "faulthandler_timeout=0"]  # which would end this process, and all parts
    code = pytest.main([*options, "-k", "any_", *files])
    kept = "each gave a place or a value, or one line" if code == 0 else "FAILED"
    return f"10,000 environments and 10,000 settings: {kept}.", code == 0


if __name__ == "__main__":
    print(prove_attacks(int(sys.argv[1]))[0])
