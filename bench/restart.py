"""Compare the time from a killed rank to training again: `make bench-restart`, or
python bench/restart.py [RUNS].

One node, or two on loopback, train a small DDP model. Once training is steady, rank 1 is killed
with SIGKILL. Measures the seconds from the kill to the end of the first step that all ranks
complete, without loading a checkpoint. All launchers run in turn, RUNS times (default 7).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import NamedTuple

from harness import (
    AGENT,
    OWN_STORES,
    ROOT,
    TORCHRUN,
    in_turns,
    ratio,
    render,
    spread,
    times_or,
    write_section,
)

PROGRAM = str(ROOT / "bench/small_steps.py")
STEPS = "2000 5"  # of the first attempt, if no rank is killed, and of the second
SHAPES = ((1, 2), (1, 4), (2, 2))  # nodes, processes on each
# By default, torchrun's ranks meet again at the same store, where they find the addresses of dead
# ranks, so most restarts fail. With a new store for each attempt, all should work.
OWN_STORE = ["env", *(f"{name}={text}" for name, text in OWN_STORES.items()), *TORCHRUN]
REFERENCE = "torchrun, new store per attempt"
LAUNCHERS = {
    "ours": AGENT,
    "torchrun": TORCHRUN,
    REFERENCE: OWN_STORE,
    f"{REFERENCE}, checking every 0.01 s": [*OWN_STORE, "--monitor-interval=0.01"],
}
HEAD = ("nodes x processes", "launcher", "worked", "median s", "min-max s", "x torchrun that works")
VICTIM = 1
STEADY = 50  # steps
LIMIT_S = 30.0  # a run without progress by then has hung
TARGET = 0.5


class Step(NamedTuple):
    """A step that small_steps.py has recorded."""

    pid: int
    time: float  # in seconds since the epoch, at the step's end


def main() -> None:
    runs = times_or(7)
    rows = []
    for nodes, nproc in SHAPES:
        found = in_turns(
            {
                name: functools.partial(time_restart, launcher, nodes, nproc)
                for name, launcher in LAUNCHERS.items()
            },
            runs,
            warm_up=1,
        )
        worked = {name: [s for s in seconds if s is not None] for name, seconds in found.items()}
        for name, seconds in worked.items():
            cells = ["-", "-", "-"]
            if seconds and worked[REFERENCE]:
                cells = [*spread(seconds), f"{ratio(seconds, worked[REFERENCE]):.2f}"]
            rows.append([f"{nodes} x {nproc}", name, f"{len(seconds)} of {runs}", *cells])
    remarks = (
        f"Target for ours: at most {TARGET} x the time of torchrun with a new store for each"
        " attempt (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun`). By default, torchrun checks"
        " its ranks every 0.1 s (`--monitor-interval`). A restart has failed if the run"
        f" ended, or if no step was done within {LIMIT_S:.0f} s. Medians are of the restarts that"
        " worked."
    )
    write_section("restart", f", medians of {runs}", render(HEAD, rows), remarks)


def time_restart(launcher: list[str], nodes: int, nproc: int) -> float | None:
    """Return the seconds from the kill until all ranks have taken a step; None if some never do."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = Path(folder, "steps")
        file.touch()
        environment = {**os.environ, "STEPS_FILE": str(file), "STEPS": STEPS}
        environment["OMP_NUM_THREADS"] = "1"
        launched = []
        for where in places(launcher, nodes):
            command = [*launcher, *where, f"--nproc-per-node={nproc}", "--max-restarts=1", PROGRAM]
            process = Popen(command, env=environment, stdout=DEVNULL, stderr=DEVNULL)
            launched.append(stack.enter_context(process))
        before = wait_for_steps(launched, file, 0, nodes * nproc, STEADY)
        if before is None:
            raise RuntimeError(f"no steady run of {' '.join(launcher)}")
        killed = time.time()
        os.kill(before[VICTIM][0].pid, signal.SIGKILL)
        after = wait_for_steps(launched, file, 1, nodes * nproc, 1)
        if after is None:
            for process in launched:
                process.terminate()
    return max(steps[0].time for steps in after.values()) - killed if after else None


def places(launcher: list[str], nodes: int) -> list[list[str]]:
    """Return the options that give each node's launcher its place in the run."""
    if nodes == 1:
        return [[] if launcher in (AGENT, TORCHRUN) else ["--standalone"]]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    if launcher == AGENT:
        meet = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    else:  # their ranks must meet again, which a static rendezvous does not allow
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        meet.append("--local-addr=127.0.0.1")
    return [[f"--nnodes={nodes}", f"--node-rank={node}", *meet] for node in range(nodes)]


def wait_for_steps(
    launched: list[Popen[bytes]], file: Path, attempt: int, ranks: int, count: int
) -> dict[int, list[Step]] | None:
    """Wait until each rank has done that many steps of an attempt; returns them by rank.

    Returns None if the launchers exit before that, or if one hangs.
    """
    end = time.time() + LIMIT_S
    while time.time() < end:
        has_ended = all(process.poll() is not None for process in launched)
        done: dict[int, list[Step]] = {rank: [] for rank in range(ranks)}
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


if __name__ == "__main__":
    main()
