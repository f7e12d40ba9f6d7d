"""A lost node to training again: `make bench-spares` (as root), or python bench/spares.py [TIMES].

On a cluster in a box, spare_steps.py runs on four nodes with a rank each, and a fifth is ready:
SPARES=1 here; for torchrun an agent more than --nnodes, which it keeps as a redundant node. Node 2
or node 0 is lost: all processes of the run on it are killed, its cable is pulled, or the machine
stops. From there to the end of the first step of the next attempt, and the steps that are done
again, with a checkpoint every 50 steps, and here a snapshot in memory every 5. Medians of TIMES
(default 3).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import (
    CLUSTER,
    OWN_STORES,
    ROOT,
    TORCHRUN,
    cluster,
    in_turns,
    render,
    times_or,
    write_section,
)
from snapshots import read

from launcher import processes

NODES = ("node1", "node2", "node3", "node4", "node5")
PORT = 23500
FAULTS = {"processes killed": "kill", "cable pulled": "cut", "machine stopped": "stop"}
LOST = {"node 2": "node3", "node 0": "node1"}
SCRIPT = str(ROOT / "bench/spare_steps.py")
KILL_AFTER = 73  # steps
LIMIT_S = 90.0
REMARKS = f"""\
A run that makes no step within {LIMIT_S:.0f} s is lost. Seconds count from the fault: a cut cable
and a stopped machine are noticed within 10 s. The copy of node 0's snapshot travels in the
background."""


def main() -> None:
    times = times_or(3)
    rows = []
    with cluster(len(NODES)) as is_up:
        if not is_up:
            sys.exit(1)
        for (what, fault), (place, host) in ((a, b) for a in FAULTS.items() for b in LOST.items()):
            measures = {
                name: functools.partial(lose, launch, fault, host)
                for name, launch in LAUNCHERS.items()
            }
            for name, found in in_turns(measures, times).items():
                rows.append([what, place, name, *summarise(found)])
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    head = ["fault", "of", "launcher", "went on", "next step after, median s", "steps lost, median"]
    write_section("spares", f", medians of {times}", render(head, rows), REMARKS)


def summarise(found: list[tuple[float, int] | None]) -> list[str]:
    well = [one for one in found if one is not None]
    cells = [f"{len(well)} of {len(found)}"]
    if not well:
        return [*cells, "-", "-"]
    seconds, steps = ([one[at] for one in well] for at in (0, 1))
    return [*cells, f"{statistics.median(seconds):.1f}", f"{statistics.median(steps):.0f}"]


# --- launchers ----------------------------------------------------------------------------------


@contextlib.contextmanager
def ours(folder: Path) -> Iterator[Callable[[], bool]]:
    """Run the script here; yields what tells whether it has ended."""
    words = [str(ROOT / "scripts/ssh/launch_torchrun_auto.sh"), "-", "1", *NODES, "--"]
    variables = {"SPARES": "1", "MAX_RESTARTS": "2", "GRACE": "5", "NO_COLOR": "1"}
    variables |= {"TRAIN_SCRIPT": SCRIPT, "RUN_ID": "lost", "LOG_DIR": str(folder)}
    with start("login", words, folder, variables) as run:
        yield lambda: run.poll() is not None
        on("login", "pkill", "-TERM", "-f", "launch_torchrun_auto")


@contextlib.contextmanager
def torchrun(folder: Path) -> Iterator[Callable[[], bool]]:
    """The same, by hand on each node; the fifth once the others make steps."""
    words = [*TORCHRUN, "--nnodes=4", "--nproc-per-node=1"]
    words += ["--max-restarts=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=node1:{PORT}"]
    words += ["--rdzv-id=bench", SCRIPT]
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(start(n, words, folder, OWN_STORES)) for n in NODES[:-1]]
        wait(lambda: len(steps_of(folder)) > 1)
        agents.append(stack.enter_context(start(NODES[-1], words, folder, OWN_STORES)))
        yield lambda: all(agent.poll() is not None for agent in agents)
        for node in NODES:
            on(node, "pkill", "-KILL", "-f", "rdzv-id=bench|spare_steps")


LAUNCHERS = {"ours": ours, "torchrun": torchrun}


@contextlib.contextmanager
def start(
    host: str, words: list[str], folder: Path, variables: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    own = {"OMP_NUM_THREADS": "1", **variables}
    with (folder / f"output_{host}").open("wb") as output:
        run = subprocess.Popen(
            [CLUSTER, "run", host, *words, str(folder)],
            cwd=folder,
            env={**os.environ, "PYTHON": sys.executable, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    with run:
        yield run
        for pid in processes.descendants(run.pid):  # nsenter stops with what it has started
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


# --- faults -------------------------------------------------------------------------------------


def lose(
    launch: Callable[[Path], contextlib.AbstractContextManager[Callable[[], bool]]],
    fault: str,
    host: str,
) -> tuple[float, int] | None:
    """Return the seconds to the next attempt's first step, and the steps lost; None: no step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with launch(folder) as has_ended:
            wait(lambda: last_step(folder) >= KILL_AFTER)
            make(fault, host)
            lost = time.time()
            wait(lambda: has_ended() or bool(find_next(folder, lost)), is_sure=False)
            undo(fault, host)
            return find_next(folder, lost)


def make(fault: str, host: str) -> None:
    if fault == "cut":
        subprocess.run([CLUSTER, "cut", host], check=True)
    elif fault == "stop":
        on(host, "bash", "-c", "kill -STOP -1")
    else:
        on(host, "pkill", "-KILL", "-f", "rdzv-id[= ]|spare_steps")


def undo(fault: str, host: str) -> None:
    if fault == "cut":
        subprocess.run([CLUSTER, "restore", host], check=True)
    elif fault == "stop":
        on(host, "bash", "-c", "kill -CONT -1")


def on(host: str, *command: str) -> None:
    subprocess.run([CLUSTER, "run", host, *command])


def find_next(folder: Path, lost: float) -> tuple[float, int] | None:
    """Look for the next attempt's first step: the first that came after the one resumed from."""
    output = "".join(file.read_text(errors="replace") for file in folder.glob("output_*"))
    resumed = re.findall(r"resumed +after step (\d+)", output)
    if not resumed:
        return None
    number, steps = int(resumed[-1]), steps_of(folder)
    (*_, at) = [-1, *(at for at, one in enumerate(steps) if one[0] == number + 1)]
    if at < 0 or steps[at][1] < lost:
        return None
    return steps[at][1] - lost, max(step for step, _ in steps[:at]) - number


def steps_of(folder: Path) -> list[tuple[int, float]]:
    return read(folder / "steps.jsonl")


def last_step(folder: Path) -> int:
    return max((step for step, _ in steps_of(folder)), default=0)


def wait(has_come: Callable[[], bool], *, is_sure: bool = True) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not has_come():
        if time.monotonic() > deadline:
            if is_sure:
                raise TimeoutError(f"no step within {LIMIT_S:g} s")
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main()
