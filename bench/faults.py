"""Cause every fault that the simulated cluster allows, one at a time on one of four nodes.

`make bench-faults` (as root), or
python bench/faults.py [--wait SECONDS] [--skip-torchrun] [--untimed] [NAME...].

Each fault is caused once for a launch of this project, and once for torchrun alone, started on each
node over ssh. The table shows what is reported first, and after how many seconds, counted from the
start of the command or, if the fault is caused during a run, from the fault. For torchrun, this is
the first line from any node (even one from ssh) that reports an error and that a healthy run does
not print, within --wait seconds (default 60). There are also healthy launches, which must report no
fault.

Writes bench/faults.md; fails unless each fault is named within its limit, with its host and the
right exit code. With names, only those rows are run. With names or --skip-torchrun, it prints the
table instead. tests/cluster/faults.bats runs some rows without timing them, and `make prove
PART=faults` runs all.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import quoted
from fault_case import Case
from fault_rows import BEFORE, SECRET, Elsewhere, Fault
from fault_rows_in_runs import IN_RUNS
from harness import ROOT, cluster, describe_machine, render
from shape_runs import without_numbers

PAGE = Path(__file__).with_name("faults.md")
LIMIT_S = 300.0  # for one of our launches to end; only there to end a hang
MANY = 200  # lines of steps after the fault: with more, training continues
BESIDE = 3  # runs of torchrun at once
HARMLESS = 3  # runs of torchrun without a fault: what they print is not an error
TIMES = 20  # healthy launches
HEALTHY = ("plain", "train", "slurm", "hand")  # in turn
NAME = re.compile(r"^.*\[(stranger|[a-z]+(?:-[a-z]+)+)\]$", re.MULTILINE)
ERROR = re.compile(
    r"error|exception|errno|refused|denied|no route|not found|no such|cannot|failed|failure"
    r"|timed out|killed|read-only|closed",
    re.IGNORECASE,
)
# The lines of a traceback before the error, and a name server that does not know a client.
NO_ERROR = re.compile(r"(\[\w+\]:)?(Traceback |  )|.*The hostname of the client socket")
INTRODUCTION = """# Faults

This page shows what is printed for each fault that can be caused on the cluster on one machine: one
fault at a time, on one of four nodes with one rank each. `make bench-faults` (as root) measures it
again in about 30 min.

Seconds are counted from the start of the command or, for a fault in a run, from the fault. The
launch over ssh runs once, on a login host; "by hand" and "SLURM" say how else it was started.
torchrun was started on each node by hand over ssh. Its column has the first line from any node that
reports an error, even one from ssh. "-" means that the fault cannot be caused for torchrun.

A fault is named correctly if its own name is the only one printed (by hand, a node that starts
after the others have ended may also report that they are missing), with its host and the right exit
code, and in time: within 15 s before the start, 2 s for a killed process, 15 s for a cut link, and
30 s more than the limit for a rank that hangs.
"""


# --- ours ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Whether a fault was named as it should be, and the cells of its row."""

    is_right: bool
    shown: str
    hosts: str


def name_in(output: str) -> str | None:
    found = NAME.search(output)
    return found and found[0]


def launch(fault: Fault, *, is_timed: bool = True) -> Verdict:
    """Cause a fault for one of our launches."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        case = Case(fault, Path(folder))
        if fault.command.startswith(("job", "slurm", "lose_job")):
            case.run("wait_for_slurm")
        try:
            with case:
                sight = case.watch(fault.command, fault.during, name_in, LIMIT_S)
        except subprocess.SubprocessError as error:
            return Verdict(False, f"WRONG: {error}", "")
    names = [*dict.fromkeys(found[1] for found in NAME.finditer(sight.output))]
    named = [found[0] for found in NAME.finditer(sight.output) if found[1] == fault.name]
    hosts = {host: "" for line in named for host in re.findall(fault.host or "$^", line)}
    wrong = {
        f"`{'`, `'.join(names) or 'no name'}`": names[:1] != [fault.name]
        or bool({*names} - {fault.name, fault.also}),
        "no host": not any(re.search(fault.host, line) for line in named),
        f"late, after {fault.limit_s:g} s": is_timed and sight.seconds > fault.limit_s,
        f"code {sight.code}, not {fault.code}": sight.code != fault.code,
    }
    said = [text for text, is_so in wrong.items() if is_so]
    if said:
        told = re.sub(r"(?m)^(\[\d\] )?step .*\n", "", sight.output)
        print(f"--- {fault.name}, {fault.made}: {', '.join(said)}\n{told}", file=sys.stderr)
    shown = f"`[{fault.name}]`, {sight.seconds:.1f} s, code {sight.code}"
    return Verdict(
        not said, f"{shown}: WRONG: {', '.join(said)}" if said else shown, ", ".join(hosts)
    )


def launch_healthy() -> int:
    """Return how many healthy launches named no fault and exited with 0."""
    well = 0
    for command in itertools.islice(itertools.cycle(HEALTHY), TIMES):
        fault = Fault("", "", variables={"RUN_SECRET": SECRET} if command == "hand" else {})
        with tempfile.TemporaryDirectory(prefix="fault-") as folder:
            case = Case(fault, Path(folder))
            if command == "slurm":
                case.run("wait_for_slurm")
            sight = case.watch(command, "", name_in, LIMIT_S)
        is_well = sight.line is None and sight.code == 0
        well += is_well
        print(f"healthy, {command}: {is_well}", file=sys.stderr, flush=True)
        if not is_well:
            print(sight.output, file=sys.stderr)
    return well


# --- torchrun -----------------------------------------------------------------------------------


def run_torchrun(fault: Fault, wait_s: float, harmless: set[str]) -> str:
    """Cause a fault for torchrun; returns what it showed, and after how long."""
    if not fault.torchrun:
        return "-"

    def find(output: str) -> str | None:
        for line in output.rpartition("\n")[0].splitlines():
            is_told = ERROR.search(line) and not NO_ERROR.match(line)
            if is_told and not harmless & {*without_numbers([line])}:
                return line
        return None

    with (
        tempfile.TemporaryDirectory(prefix="fault-") as folder,
        Case(fault, Path(folder)) as case,
    ):
        try:
            sight = case.watch(fault.torchrun, fault.during, find, wait_s, is_whole=False)
        finally:
            case.run("end_torchrun")
    if sight.line:
        return f"`{shorten(sight.line)}`, {sight.seconds:.1f} s"
    if sight.code is None and sight.output.count("step ") > MANY:
        return f"nothing for {wait_s:g} s; training continues (ended here)"
    if sight.code is None:
        return f"silence for {wait_s:g} s (ended here)"
    return f"nothing; exits with code {sight.code}"


def shorten(line: str) -> str:
    """Return a line without its time and labels, cut to fit into a table."""
    label = r"^(\[\w+\]: ?)*([EWI]\d{4} [\d:.]+ \d+ |\[W[\d:. ]+\S+\] )?"
    text = re.sub(label, "", " ".join(line.split()))
    text = text.replace("|", "/").replace("`", "'").replace(f"{ROOT}/", "")
    return text if len(text) <= 110 else f"{text[:107]}..."


def run_all_torchrun(faults: Sequence[Fault], wait_s: float) -> dict[Fault, str]:
    """Run torchrun with each fault; several at once if they do not affect other runs."""
    healthy = Fault("", "")
    harmless: set[str] = set()
    for _ in range(HARMLESS):
        with tempfile.TemporaryDirectory(prefix="fault-") as folder:
            case = Case(healthy, Path(folder))
            sight = case.watch("torchrun", "", lambda output: None, wait_s)
            case.run("end_torchrun")
        print(f"torchrun without a fault: code {sight.code}", file=sys.stderr, flush=True)
        harmless |= {*without_numbers(sight.output.splitlines())}

    def run_one(fault: Fault) -> tuple[Fault, str]:
        try:
            cell = run_torchrun(fault, wait_s, harmless)
        except subprocess.SubprocessError as error:
            cell = f"not caused: {error}"
        print(f"torchrun | {fault.name} | {fault.made} | {cell}", file=sys.stderr, flush=True)
        return fault, cell

    alone = dict(run_one(fault) for fault in faults if not fault.is_apart)
    with ThreadPoolExecutor(BESIDE) as pool:
        return alone | dict(pool.map(run_one, (fault for fault in faults if fault.is_apart)))


# --- the page -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--skip-torchrun", action="store_true")
    parser.add_argument("--untimed", action="store_true", help="also accept late reports")
    parser.add_argument("names", nargs="*")
    words = parser.parse_args()
    rows = [row for row in BEFORE + IN_RUNS if not words.names or row.name in words.names]
    faults = [row for row in rows if isinstance(row, Fault)]
    with cluster(4) as is_up:
        if not is_up:
            sys.exit(1)
        with Path(os.environ["CLUSTER_DIR"], "etc/hosts").open("a") as hosts:
            hosts.write("10.0.0.1 head\n")  # another name for the master
        theirs = {} if words.skip_torchrun else run_all_torchrun(faults, words.wait)
        healthy = 0 if words.names else launch_healthy()
        verdicts: dict[Fault, Verdict] = {}
        for fault in faults:
            verdicts[fault] = launch(fault, is_timed=not words.untimed)
            print(f"{fault.name} | {fault.made} | {verdicts[fault]}", file=sys.stderr, flush=True)
    right = sum(verdict.is_right for verdict in verdicts.values())
    table = write_table(rows, verdicts, theirs)
    named = f"{right} of {len(faults)} named correctly"
    if not words.names:
        named += f", {healthy} of {TIMES} healthy runs without a false alarm"
    if words.names or words.skip_torchrun:
        print(f"{table}\n\n{named}.")
    else:
        machine = describe_machine("make bench-faults")
        PAGE.write_text(f"{INTRODUCTION}\n{machine}\n\n{named}.\n\n{table}\n")
        quoted.record("make bench-faults")
    sys.exit(right < len(faults) or (not words.names and healthy < TIMES))


def write_table(
    rows: Sequence[Fault | Elsewhere], verdicts: dict[Fault, Verdict], theirs: dict[Fault, str]
) -> str:
    cells = []
    for row in rows:
        if isinstance(row, Elsewhere):
            cells.append([row.name, row.why, "", "", ""])
        else:
            verdict = verdicts[row]
            cells.append([row.name, row.made, theirs.get(row, ""), verdict.shown, verdict.hosts])
    head = ["fault", "how it was caused", "torchrun shows, after", "this project shows, after"]
    head.append("host named")
    return render(head, cells)


if __name__ == "__main__":
    main()
