"""What `make prove` repeats: attacks, kills, and hangs that must be named."""

import contextlib
import io
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import others
import pytest
from agents import LOOPS, PROGRAM, PROMISED_S, ROOT, Run, kill_what_is_left, run_program
from harness import render
from page_loop import interrupt_at_random
from test_agents_together import attack_a_run
from test_checkpoint import flip_old_ones
from test_clean_up import VICTIMS, hit, start_run

PIDS = Path(f"/sys/fs/cgroup/pids/prove-{os.getpid()}")
NO_MORE_PROCESSES = "no further process (pids.max)"
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
    """Attack with 50 * times byte sequences and messages, with damaged files and invalid inputs."""
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
    """Flip a bit in every byte of the files that describe an old checkpoint."""
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


def prove_page_loop(times: int) -> tuple[str, bool]:
    """Stop and kill the loop of docs/your-script.md at 4 * times random moments."""
    rows, are_equal = [], True
    for strategy, workers, moments in (
        ("ddp", 0, 2 * times),
        ("ddp", 2, times),
        ("fsdp", 0, times),
    ):
        with tempfile.TemporaryDirectory() as folder:
            done, is_equal = interrupt_at_random(Path(folder), moments, strategy, workers)
        rows.append([strategy, str(workers), str(done), "equal" if is_equal else "DIFFER"])
        are_equal = are_equal and is_equal
    table = render(["strategy", "data workers each", "stops and kills", "weights"], rows)
    what = "The loop of docs/your-script.md, with dropout, compared with an unbroken run"
    how = "SIGTERM to the launcher, SIGKILL to it or to a rank, at random moments"
    return f"{what}: {how}\n\n{table}", are_equal


def prove_clean_up(times: int) -> tuple[str, bool]:
    """Kill or stop the supervisor, the agent or both, under several limits; ranks fork twice."""
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
    """Kill once; returns the result of end_of()."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # for a user who is not root
        if limit == NO_MORE_PROCESSES:
            PIDS.mkdir()
        run = start_run(Path(folder), *LIMITS[limit])
        if limit == NO_MORE_PROCESSES:
            (PIDS / "pids.max").write_text((PIDS / "pids.current").read_text())
        began = time.monotonic()
        hit(run, victim)
        took, left = end_of(run, began)
        kill_what_is_left([run])
        if limit == NO_MORE_PROCESSES:
            while (PIDS / "pids.current").read_text() != "0\n":  # process 1 reaps the last one
                time.sleep(0.005)
            PIDS.rmdir()
    return took, left


def prove_inputs() -> tuple[str, bool]:
    """Try 10,000 environments and 10,000 settings: each gives a rank, value or one-line error."""
    files = [
        str(Path(__file__).with_name(f"test_{name}.py")) for name in ("environment", "settings")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "--hypothesis-profile=prove", "-k", "any_"]
    command += ["-o", "faulthandler_timeout=0"]  # a slow machine takes longer than the usual limit
    tried = subprocess.run([*command, *files])
    is_kept = tried.returncode == 0
    told = "each gave a rank, a value, or an error in one line" if is_kept else "FAILED"
    return f"10,000 environments and 10,000 settings: {told}.", is_kept


# --- one process dies, all stop -------------------------------------------------------------------


NPROC = 4
KILLED = {  # -> the fault in the last lines, and the launcher's exit code
    "a rank": ("[rank-killed]", 137),
    "the node agent": ("[agent-killed]", 137),
    "the launcher": ("", -9),
}


def prove_one_dies(times: int) -> tuple[str, bool]:
    rows = []
    for victim in KILLED:
        for state, busy in (("idle", ""), ("busy", "1")):
            found = [kill_once(victim, busy) for _ in range(times)]
            seconds, left, is_named = zip(*found, strict=True)
            counts = [str(times), str(sum(left)), str(times - sum(is_named))]
            took = [f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"]
            rows.append([victim, state, *counts, *took])
    head = ["kill -9 of", "ranks", "times", "processes left", "misnamed", "gone after, median s"]
    head.append("max s")
    text = f"{NPROC} ranks, each with a child of its own\n\n{render(head, rows)}"
    return text, all(row[3] == row[4] == "0" and float(row[6]) < PROMISED_S for row in rows)


def kill_once(victim: str, busy: str) -> tuple[float, int, bool]:
    """Kill once; returns the result of end_of(), and whether the victim was named."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "program.py")
        script.write_text(PROGRAM)
        run = Run(["--nproc-per-node", str(NPROC), str(script), "sleep", "0"], BUSY=busy)
        run.wait_for(*(f"ready {rank}" for rank in range(NPROC)))
        time.sleep(random.uniform(0, 0.5))  # the random moment itself, not a wait
        ranks = run.rank_pids()
        run.look()
        number = random.randrange(NPROC)
        target = {"a rank": ranks[number], "the node agent": run.agent_pid()}
        began = time.monotonic()
        os.kill(target.get(victim, run.process.pid), signal.SIGKILL)
        took, left = end_of(run, began)
        told = run.finish()
    name, code = KILLED[victim]
    is_named = name in told and (victim != "a rank" or f"FAILED   rank {number} " in told)
    return took, left, is_named and run.process.returncode == code


def end_of(run: Run, began: float) -> tuple[float, int]:
    """Return how long it took until all processes were gone, and how many were left after 10 s."""
    while run.survivors() and time.monotonic() < began + 10:
        time.sleep(0.005)
    return time.monotonic() - began, len(run.survivors())


# --- which rank hangs -----------------------------------------------------------------------------

# In each run, one of three ranks, drawn at random, sleeps forever at a random step.
RANKS = 3
# -> arguments of own_loops.py, optimizer steps for each of its steps, and HANG_SECONDS, which is
# longer than the start takes, even on a busy machine, where the imports can take 10 s.
KINDS = {
    "plain DDP, in its data": ("plain data", 1, 5),
    "plain DDP, in a validation on one rank": ("plain validation", 1, 5),
    "gradient accumulation of 8": ("accumulated data", 1, 5),
    "two optimizers, one making two steps": ("two data", 2, 5),
    "accelerate": ("accelerate data", 1, 30),
    "Lightning": ("lightning data", 1, 60),
}


def prove_hangs(times: int) -> tuple[str, bool]:
    python = str(others.environment("shapes", ["accelerate", "lightning"]))
    rows, named = [], 0
    for what, (words, steps, limit_s) in KINDS.items():
        kind, where = words.split()
        found = [hang(python, kind, where, steps, limit_s) for _ in range(times)]
        ranks, named_steps, seconds = zip(*found, strict=True)
        late = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})"
        rows.append([what, f"{sum(ranks)} of {times}", f"{sum(named_steps)} of {times}", late])
        named += sum(ranks) + sum(named_steps)
    head = ["script", "rank named", "step named", "s from the last step to the end (max)"]
    text = "One of three ranks sleeps forever at a random step; `HANG_SECONDS` is 5, 30 or 60"
    return f"{text}\n\n{render(head, rows)}", named == 2 * times * len(KINDS)


def hang(python: str, kind: str, where: str, steps: int, limit_s: int) -> tuple[bool, bool, float]:
    """Return whether the rank and its step were named, and how long after the last step."""
    rank, step = random.randrange(RANKS), random.randrange(3, 60)
    agent = [python, str(ROOT / "scripts/lib/agent.py"), f"--nproc-per-node={RANKS}"]
    words = [LOOPS, kind, step, rank, where]
    run = run_program([*agent, *words], HANG_SECONDS=str(limit_s), OMP_NUM_THREADS="1")
    silence = re.search(r"no progress reported for (\d+) s", run.stderr)
    block = re.search(r"^FAILED   rank (\d+) .*, at step (\d+) ", run.stderr, re.M)
    if silence is None or block is None:
        print(run.stderr, file=sys.stderr)
        return False, False, float("nan")
    done = step * steps + (where == "validation")
    return int(block[1]) == rank, int(block[2]) == done, float(silence[1])
