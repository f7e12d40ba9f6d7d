"""Kill one process of a run: whether all others stop, and the right one is named."""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from agents import PROGRAM, PROMISED_S, Run
from harness import render

NPROC = 4
VICTIMS = {  # -> what the last lines name, and the launcher's exit code
    "a rank": ("[rank-killed]", 137),
    "the node agent": ("[agent-killed]", 137),
    "the launcher": ("", -9),
}


@dataclass
class Tally:
    seconds: list[float] = field(default_factory=list)  # until every process was gone
    left: int = 0
    misnamed: int = 0


def prove_one_dies(times: int) -> tuple[str, bool]:
    rows = []
    for victim in VICTIMS:
        for busy in ("", "1"):
            tally = Tally()
            for _ in range(times):
                kill_once(victim, busy, tally)
            rows.append(summarise(victim, busy, times, tally))
    head = ["kill -9 of", "ranks", "times", "processes left", "misnamed", "gone after, median s"]
    head.append("max s")
    text = f"{NPROC} ranks, each with a child of its own\n\n{render(head, rows)}"
    return text, all(row[3] == row[4] == "0" and float(row[6]) < PROMISED_S for row in rows)


def kill_once(victim: str, busy: str, tally: Tally) -> None:
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
        while run.survivors() and time.monotonic() < began + 10:
            time.sleep(0.005)
        tally.seconds.append(time.monotonic() - began)
        tally.left += len(run.survivors())
        told = run.finish()
        name, code = VICTIMS[victim]
        is_named = name in told and (victim != "a rank" or f"FAILED   rank {number} " in told)
        tally.misnamed += not (is_named and run.process.returncode == code)


def summarise(victim: str, busy: str, times: int, tally: Tally) -> list[str]:
    state = "busy" if busy else "idle"
    middle, most = statistics.median(tally.seconds), max(tally.seconds)
    counts = [str(times), str(tally.left), str(tally.misnamed)]
    return [victim, state, *counts, f"{middle:.2f}", f"{most:.2f}"]
