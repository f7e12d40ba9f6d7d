"""The long proofs, whole: `make prove`, or `make prove TIMES=2` for a tenth of them.

One dies, all stop: kills a rank, the node agent, or the launcher, with idle and with busy ranks,
TIMES times each (default 20) at random moments; how many processes were left, whether the right one
was named with the right code, and how long the rest lived.

Nobody gets in, nothing stops the clean-up: attacks on ports, checkpoints and processes
(tests/unit/attacks.py).

Nothing is lost: kills all ranks at 10 x TIMES random points of saving full checkpoints and as many
of sharded ones, a rank at 5 x TIMES random moments of runs with snapshots of each format, and stops
runs 1, 5 and TIMES times; whether the weights and the metrics are those of a run that nobody
touched.

On a cluster in a box, under a real SLURM: TIMES stops of one run, half as many cancelled jobs, a
lost node, and the weights of three shapes of a job. Over ssh and pdsh, on 4 nodes: TIMES deaths and
stops of each kind, a cut, the weights under each launcher, and 64 nodes at once. On 4 nodes and a
spare, 5 nodes for every 2 TIMES are killed, cut off or stopped, node rank 0 among them.

What measures speeds comes first, alone; then the cluster's part runs beside the rest, for it mostly
waits. Writes what came of it to bench/proofs.md; fails where a promise was not kept.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import figures
from agents import PROGRAM, PROMISED_S, Run
from attacks import prove_attacks
from conftest import isolate
from recovery import FAULT_POINTS, PART_POINTS, SHARDED, STOPS, Job, draw_kills, steps_lost
from table import describe_machine, render
from test_meter import names_slow_rank, run_with_slow_rank
from test_stops import stop_at_random

NPROC = 4
KILLS_PER_RUN = 20
PROOFS = Path(__file__).parents[1] / "bench/proofs.md"
CLUSTER = Path(__file__).parent / "cluster"
SELFTEST = CLUSTER / "selftest.bats"
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


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    text = f"# Proofs\n\n{describe_machine('make prove')}\n"
    is_kept = True
    sections = [show(prove, times) for prove in QUIET]
    with ThreadPoolExecutor() as pool:
        on_cluster = pool.submit(show, prove_cluster, times)  # it mostly waits
        sections += [show(prove, times) for prove in BESIDE]
        sections.append(on_cluster.result())
    for section, is_section_kept in sections:
        text += f"\n{section}\n"
        is_kept &= is_section_kept
    PROOFS.write_text(text, encoding="utf-8")
    figures.write()
    sys.exit(not is_kept)


def show(prove: Callable[[int], tuple[str, bool]], times: int) -> tuple[str, bool]:
    """Return a section of the page, which is shown at once, and whether its promises were kept."""
    try:
        text, is_kept = prove(times)
    except Exception:
        name = prove.__name__.removeprefix("prove_").replace("_", " ")
        text, is_kept = f"{name.capitalize()}\n\n```\n{traceback.format_exc()}```", False
    section = f"## {text}"
    print(f"{section}\n", flush=True)
    return section, is_kept


def prove_one_dies(times: int) -> tuple[str, bool]:
    rows = []
    for victim in VICTIMS:
        for busy in ("", "1"):
            tally = Tally()
            for _ in range(times):
                kill_once(victim, busy, tally)
            rows.append(summarise(victim, busy, times, tally))
    head = [
        "kill -9 of",
        "ranks",
        "times",
        "processes left",
        "misnamed",
        "gone after, median s",
        "max s",
    ]
    text = (
        f"One dies, all stop\n\n{NPROC} ranks, each with a child of its own\n\n{render(head, rows)}"
    )
    return text, all(row[3] == row[4] == "0" and float(row[6]) < PROMISED_S for row in rows)


def prove_kills(times: int) -> tuple[str, bool]:
    full, is_full_kept = kill_savers(times, "full", (), FAULT_POINTS)
    shards, is_sharded_kept = kill_savers(times, "sharded", SHARDED, PART_POINTS)
    text = (
        "Killed while saving\n\n"
        "SIGKILL to both ranks, at random points of a save. Weights and metrics are compared.\n\n"
        f"{full}\n\n{shards}"
    )
    return text, is_full_kept and is_sharded_kept


def kill_savers(
    times: int, format: str, settings: Sequence[str], points: set[str]
) -> tuple[str, bool]:
    """Kill at random points of saving, in the first run at each of `points`, too."""
    runs = max(1, 10 * times // KILLS_PER_RUN)
    equal = 0
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        longer = ["train.max_steps=120", *settings]
        never = job.finish("never", 2, *longer)
        for number in range(runs):
            named = [] if number else [f"{point} 0" for point in sorted(points)]
            kills = named + draw_kills(random.Random(), KILLS_PER_RUN - len(named), format)
            equal += job.kill_and_finish(f"killed-{number}", 2, longer, kills) == never
        found = (job.folder / "killed").read_text().split()
    counts = ", ".join(f"{name} {found.count(name)}" for name in sorted(set(found)))
    head = ["format", "kills", "runs", "equal to an uninterrupted run"]
    table = render(head, [[format, str(len(found)), str(runs), str(equal)]])
    is_kept = equal == runs and set(found) >= points
    return f"{table}\n\nPoints: {counts}.", is_kept


def prove_snapshots(times: int) -> tuple[str, bool]:
    rows = []
    for format, settings in (("full", ()), ("sharded", SHARDED)):
        with tempfile.TemporaryDirectory() as folder:
            job = Job(Path(folder))
            longer = ["train.max_steps=1500", "checkpoint.every=0", *settings]
            never, lost, kills, runs, equal = job.finish("never", 2, *longer), list[int](), 0, 0, 0
            while kills < 5 * times:
                runs += 1
                name, taking = f"killed-{runs}", [*longer, "checkpoint.snapshot_every=5"]
                output = job.kill_at_random(name, 2, taking, KILLS_PER_RUN, random.Random())
                kills += output.count("node agent: restart ")
                lost += steps_lost(output)
                equal += job.outcome(name).weights == never.weights
        rows.append([format, str(kills), str(max(lost)), str(runs), str(equal)])
    head = ["format", "kills", "most steps lost", "runs", "weights equal"]
    text = f"Snapshots every 5 steps\n\nkill -9 of a rank at random moments\n\n{render(head, rows)}"
    return text, all(int(row[2]) <= 5 and row[3] == row[4] for row in rows)


def prove_stops(times: int) -> tuple[str, bool]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        for nproc in (1, 2, 4):
            for workers in (0, 2):
                settings = [f"data.num_workers={workers}", "train.max_steps=120"]
                never = job.finish(f"never-{nproc}-{workers}", nproc, *settings)
                for stops in (1, 5, times):
                    faults = [
                        f"{random.choice(STOPS)} {random.randrange(nproc)} {random.randrange(1, 9)}"
                        for _ in range(stops)
                    ]
                    name = f"often-{nproc}-{workers}-{stops}"
                    often = job.stop_and_finish(name, nproc, settings, faults)
                    is_equal = [often.weights == never.weights, often.metrics == never.metrics]
                    row = [str(nproc), str(workers), str(stops)]
                    rows.append([*row, *("equal" if one else "DIFFER" for one in is_equal)])
    head = ["ranks", "data workers each", "stops", "weights", "metrics"]
    text = f"Stopped and resumed\n\nCompared with an uninterrupted run\n\n{render(head, rows)}"
    return text, not any("DIFFER" in row for row in rows)


def prove_own_stops(times: int) -> tuple[str, bool]:
    ends = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            ends.append(stop_at_random(Path(folder)))
    saved, told = (sum(one) for one in zip(*ends, strict=True))
    text = (
        "A script of one's own, stopped at random moments\n\nOne rank leaves by `sys.exit(1)`, one"
        f" saves for 5 s: of {times} stops, {saved} saved and {told} told rightly."
    )
    return text, saved == told == times


def prove_long(times: int) -> tuple[str, bool]:
    return run_pytest("The long tests of Python", "long and not alone")


def prove_alone(times: int) -> tuple[str, bool]:
    return run_pytest("The tests of Python that measure", "alone")


def run_pytest(title: str, marks: str) -> tuple[str, bool]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", marks, "-o", "faulthandler_timeout=600"],
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        print(done.stdout)
    return f"{title}\n\n{done.stdout.splitlines()[-1]}.", done.returncode == 0


def prove_slow_ranks(times: int) -> tuple[str, bool]:
    named = {"": 0, "1": 0}
    for _ in range(times):
        for rank in named:
            with tempfile.TemporaryDirectory() as folder:
                named[rank] += names_slow_rank(run_with_slow_rank(Path(folder), rank), rank)
    text = (
        f"A slow rank\n\nOne of two ranks computes for 1.3 times as long: named in {named['1']} of"
        f" {times} runs. Two that compute alike: {times - named['']} of {times} had one named."
    )
    return text, set(named.values()) == {times}


def prove_selftest(times: int) -> tuple[str, bool]:
    text, is_kept = run_bats(times, SELFTEST)
    return f"Slow nodes on the cluster in a box\n\n{text}", is_kept


def prove_cluster(times: int) -> tuple[str, bool]:
    text, is_kept = run_bats(times, *sorted({*CLUSTER.glob("*.bats")} - {SELFTEST}))
    return f"On the cluster in a box\n\n{text}", is_kept


def run_bats(times: int, *files: Path) -> tuple[str, bool]:
    done = subprocess.run(
        ["bats", "--print-output-on-failure", "--filter-tags", "prove", *files],
        env={**os.environ, "TIMES": str(times), "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = [re.sub(r"^ok \d+|^#", "-", line) for line in done.stdout.splitlines()[1:]]
    if done.returncode != 0:
        print(done.stdout)
    return "\n".join(lines), done.returncode == 0


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


QUIET = (prove_alone, prove_slow_ranks, prove_selftest)  # they measure: nothing else may run
BESIDE = (
    prove_one_dies,
    prove_attacks,
    prove_kills,
    prove_snapshots,
    prove_stops,
    prove_own_stops,
    prove_long,
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        isolate(own)
        main()
