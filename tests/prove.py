"""Run the long proofs, all or some; each writes its section of bench/proofs.md.

    make prove                           # every part, TIMES=5
    make prove PART=list                 # what each part covers, and how long it takes
    make prove PART="kills stops" TIMES=20

TIMES is how many times a part repeats a case; parts that kill repeat it more often. Parts that
measure speeds run first, one at a time. Then three parts run at once, because each mostly waits:
one in this process and two in others, the longest first. Exits with 1 if a promise is not kept.
"""

import argparse
import functools
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import figures
import quoted
from conftest import isolate
from harness import describe_machine, render
from proofs import prove_attacks, prove_clean_up, prove_hangs, prove_one_dies, prove_page_loop
from recovery import FAULT_POINTS, PART_POINTS, SHARDED, STOPS, Job, draw_kills, steps_lost
from test_progress import names_slow_rank, run_with_slow_rank
from test_stops import stop_at_random

KILLS_PER_RUN = 20
TIMES = 5
OFTEN = {"kills": 2, "saves": 2, "snapshots": 2, "pbs": 4}  # this many times TIMES
PROOFS = Path(__file__).parents[1] / "bench/proofs.md"
TESTS = Path(__file__).parent
WRITING = threading.Lock()  # held while the page is written: two parts can end at the same time
INTERRUPTED = threading.Event()  # once it is set, a part that has not ended proves nothing


@dataclass(frozen=True)
class Part:
    """One proof."""

    title: str  # the title of its section
    covers: str
    minutes: int  # approximate, on two cores
    prove: Callable[[int], tuple[str, bool]]  # TIMES -> its section, whether all promises held
    place: Literal["alone", "here", "beside"] = "here"  # here: one at a time, in this process


def main() -> int:
    """Run the parts, each of which replaces its section; returns the exit code."""
    names, times = read_arguments(sys.argv[1:])
    if "list" in names:
        print(render(["part", "covers", "takes", "last run"], [*list_parts()]))
        return 0

    is_kept = run_parts(names, times)
    figures.write()
    return int(not is_kept)


def run_parts(names: Sequence[str], times: int) -> bool:
    """Run each part; returns whether all promises were kept. After Ctrl-C, no more parts begin."""
    longest_first = sorted(names, key=lambda name: -PARTS[name].minutes)
    alone, here, beside = (
        [name for name in longest_first if PARTS[name].place == place]
        for place in ("alone", "here", "beside")
    )
    kept = [run(name, times) for name in alone]
    with ThreadPoolExecutor(max_workers=2) as pool:
        others = [pool.submit(run, name, times) for name in beside]
        try:
            kept += [run(name, times) for name in here]
            kept += [one.result() for one in others]
        except KeyboardInterrupt:
            INTERRUPTED.set()
            pool.shutdown(cancel_futures=True)  # waits for the parts that are running
            raise
    return all(kept)


def read_arguments(words: Sequence[str]) -> tuple[list[str], int]:
    """Return the names of the parts (all of them if none is named) and TIMES."""
    parser = argparse.ArgumentParser(prog="make prove")
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("parts", nargs="*", metavar="PART")
    args = parser.parse_args(words)
    if unknown := {*args.parts} - {*PARTS, "list"}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; PART=list shows them")
    return args.parts or [*PARTS], args.times


def list_parts() -> Iterator[list[str]]:
    page = PROOFS.read_text(encoding="utf-8")
    for name, part in PARTS.items():
        told = re.search(rf"^## {re.escape(part.title)}\n\n(\S+), .* in (\d+ min)", page, re.M)
        last = f"{told[1]}, {told[2]}" if told and "PART=" in told[0] else "with all others"
        yield [name, part.covers, f"{part.minutes} min", last]


def run(name: str, times: int) -> bool:
    """Run a part, and write its section; returns whether its promises were kept."""
    part, began = PARTS[name], time.monotonic()
    try:
        text, is_kept = part.prove(times * OFTEN.get(name, 1))
    except Exception:
        text, is_kept = f"```\n{traceback.format_exc()}```", False
    if INTERRUPTED.is_set():
        return False
    minutes = math.ceil((time.monotonic() - began) / 60)
    about = describe_machine(f"make prove PART={name} TIMES={times}")
    section = f"## {part.title}\n\n{about}, in {minutes} min\n\n{text.strip()}\n"
    print(f"{section}\n{name}: {'kept' if is_kept else 'NOT KEPT'}\n", flush=True)
    with WRITING:
        PROOFS.write_text(replace_section(PROOFS.read_text(encoding="utf-8"), section, part.title))
        quoted.record(f"make prove PART={name}")
    return is_kept


def replace_section(page: str, section: str, title: str) -> str:
    """Return the page of proofs with the section of that title replaced, or appended."""
    head, *sections = re.split(r"^(?=## )", page, flags=re.M)
    titles = [one.partition("\n")[0].removeprefix("## ") for one in sections]
    at = titles.index(title) if title in titles else len(titles)
    sections[at : at + 1] = [section]
    return "\n".join(part.strip() + "\n" for part in (head, *sections))


def prove_kills(times: int) -> tuple[str, bool]:
    full, is_full_kept = kill_savers(times, "full", (), FAULT_POINTS)
    shards, is_sharded_kept = kill_savers(times, "sharded", SHARDED, PART_POINTS)
    text = (
        "SIGKILL to both ranks, at random points of a save. Weights and metrics are compared.\n\n"
        f"{full}\n\n{shards}"
    )
    return text, is_full_kept and is_sharded_kept


def kill_savers(
    times: int, format: str, settings: Sequence[str], points: set[str]
) -> tuple[str, bool]:
    """Kill at random points of the save, and in the first run also at each of `points`."""
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
    text = f"kill -9 of a rank at random moments\n\n{render(head, rows)}"
    return text, all(int(row[2]) <= 5 and row[3] == row[4] for row in rows)


def prove_stops(times: int) -> tuple[str, bool]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        for nproc in (1, 2, 4):
            for workers in (0, 2):
                settings = [f"data.num_workers={workers}", "train.max_steps=120"]
                never = job.finish(f"never-{nproc}-{workers}", nproc, *settings)
                for stops in sorted({1, 5, times}):
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
    text = f"Compared with an uninterrupted run\n\n{render(head, rows)}"
    return text, not any("DIFFER" in row for row in rows)


def prove_own_stops(times: int) -> tuple[str, bool]:
    ends = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            ends.append(stop_at_random(Path(folder)))
    saved, told = (sum(one) for one in zip(*ends, strict=True))
    text = (
        "One rank exits by `sys.exit(1)`, one"
        f" saves for 5 s: of {times} stops, {saved} saved and {told} were reported correctly."
    )
    table, is_equal = prove_page_loop(times)
    return f"{text}\n\n{table}", is_equal and saved == told == times


def run_pytest(marks: str, workers: int, times: int) -> tuple[str, bool]:
    """Run the suite's tests with these marks; `times` has no effect."""
    options = ["-q", "-n", str(workers), "--dist", "worksteal", "-m", marks]
    pytest = [sys.executable, "-m", "pytest", *options, "-o", "faulthandler_timeout=600"]
    lines, is_kept = run_tests(pytest, {})
    return f"{lines[-1]}.", is_kept


def prove_slow_ranks(times: int) -> tuple[str, bool]:
    named = {"": 0, "1": 0}
    for _ in range(times):
        for rank in named:
            with tempfile.TemporaryDirectory() as folder:
                named[rank] += names_slow_rank(run_with_slow_rank(Path(folder), rank), rank)
    text = (
        f"One of two ranks computes for 1.3 times as long: named in {named['1']} of"
        f" {times} runs. Two that compute alike: {times - named['']} of {times} had one named."
    )
    return text, set(named.values()) == {times}


def run_bats(files: str, tag: str, times: int) -> tuple[str, bool]:
    """Run the tests in a file or folder of tests/ that have this tag."""
    bats = ["bats", "--print-output-on-failure", "--filter-tags", tag, str(TESTS / files)]
    lines, is_kept = run_tests(bats, {"TIMES": str(times), "PYTHON": sys.executable})
    return "\n".join(re.sub(r"^ok \d+|^#", "-", line) for line in lines[1:]), is_kept


def prove_faults(times: int) -> tuple[str, bool]:
    """Cause each fault of bench/fault_rows.py once, and start healthy launches."""
    program = str(TESTS.parent / "bench/faults.py")
    lines, is_kept = run_tests([sys.executable, program, "--skip-torchrun"], {})
    return lines[-1], is_kept


def run_tests(command: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], bool]:
    """Run tests, showing their output if any fails; Ctrl-C lets them clean up.

    They test signals, some of which nohup would make them ignore.
    """
    with subprocess.Popen(
        ["env", "--default-signal=INT,QUIT,HUP", *command],
        stdin=subprocess.DEVNULL,  # a terminal stops background processes that read from it
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    ) as tests:
        try:
            output, _ = tests.communicate()
        except KeyboardInterrupt:
            tests.communicate()
            raise
    if tests.returncode != 0:
        print(output)
    return output.splitlines(), tests.returncode == 0


def on_cluster(title: str, file: str, covers: str, minutes: int, *place: Any) -> Part:
    prove = functools.partial(run_bats, f"cluster/{file}.bats", "prove")
    return Part(title, covers, minutes, prove, *(place or ["beside"]))


PARTS = {
    "measures": Part(
        "Tests of Python that measure",
        "speeds, compared with each other",
        2,
        functools.partial(run_pytest, "alone", 0),
        "alone",
    ),
    "ranks": Part(
        "A slow rank",
        "a rank that takes 1.3 times as long per step is named, and no other",
        2,
        prove_slow_ranks,
        "alone",
    ),
    "selftest": on_cluster(
        *("Slow nodes on the cluster in a box", "selftest"),
        "slow links, nodes and ranks are named, healthy ones not",
        *(9, "alone"),
    ),
    "kills": Part(
        "One dies, all stop",
        "kill -9 of ranks, agents, launchers: all gone within 2 s",
        1,
        prove_one_dies,
        "alone",
    ),
    "clean-up": Part(
        "Clean-up",
        "an agent or its supervisor killed, under tight limits: all gone within 2 s",
        2,
        prove_clean_up,
        "alone",
    ),
    "faults": Part(
        "Faults of nodes",
        "each fault of bench/faults.md: its name, host and exit code, in time",
        9,
        prove_faults,
        "alone",
    ),
    "attacks": Part("Attacks", "ports, checkpoints, inputs attacked", 7, prove_attacks),
    "saves": Part(
        "Killed while saving", "20 x TIMES kills of each format's saving", 13, prove_kills
    ),
    "snapshots": Part(
        "Snapshots every 5 steps", "10 x TIMES kills of each format", 17, prove_snapshots
    ),
    "stops": Part("Stopped and resumed", "1, 5 and TIMES stops a run, by size", 6, prove_stops),
    "own-stops": Part(
        "A user's script, stopped at random moments",
        "what it saves, whether the report is right, and the page's loop, also killed",
        4,
        prove_own_stops,
    ),
    "hangs": Part(
        "Which rank hangs, in a script that reports no progress",
        "the rank and its step are named, for hand-written loops, accelerate and Lightning",
        12,
        prove_hangs,
    ),
    "long": Part(
        "Long tests of Python",
        "pytest -m long, except the scripts of the part shapes",
        15,
        functools.partial(run_pytest, "long and not alone and not in_shapes", 2),
        "beside",
    ),
    "scripts": Part(
        "Long tests of the scripts",
        "less common ways to use the scripts",
        2,
        functools.partial(run_bats, "scripts", "long"),
        "beside",
    ),
    "slurm": on_cluster("SLURM", "slurm", "stops, requeues, lost nodes, shapes, chains", 45),
    "pbs": on_cluster(
        "PBS", "pbs", "4 x TIMES each: qdel, walltime, qrerun, qsig (a stand-in)", 12
    ),
    "ssh": on_cluster("ssh and pdsh", "ssh", "deaths, stops, cuts, equal weights, 64 nodes", 30),
    "spares": on_cluster("Spare nodes", "spares", "nodes killed, cut off, stopped", 15),
    "containers": on_cluster("Containers", "containers", "Charliecloud and podman", 4),
    "shapes": on_cluster("Shapes of public scripts", "shapes", "the same as under torchrun", 25),
    "commands": on_cluster("Command lines", "command_lines", "every documented command line", 5),
    "affinity": on_cluster("CPUs of the ranks", "affinity", "by sbatch, salloc, srun and ssh", 1),
    "box": on_cluster("The cluster in a box", "cluster", "SLURM, ssh, pdsh, cuts and limits", 2),
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        isolate(own)
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            sys.exit(130)
