"""Test what must work on a machine with a GPU, in at most 9 minutes: `make test-gpu`.

    PYTHONPATH=.:bench python tests/gpu [--nccl] [--json FILE] [--keep FOLDER] [--seconds N]
                                        [WORD...]

Needs torch and PyYAML, but neither root nor a network. Prints a table with a row for each
thing that must work: pass, FAIL or why it did not run, and figures. With WORDs, runs only rows
whose names contain one of them. Without a GPU, rows that need one say so. Exits with 1 if a row
fails.

With --nccl, these are the rows of `make test-nccl`, in at most 7 minutes: ranks that share the GPUs
there are, through NCCL. What users see of each failure is kept in FOLDER/blocks or, beside
FILE.json, in FILE.blocks. With --pretend, all but a few run without a GPU, through gloo.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu_runs import COMMAND_S, HAS_GPU, PATIENCE, CannotRun, Failed, Machine
from harness import describe_machine, render
from nccl_rows import NCCL
from rows import ROWS, Row

LIMIT_S, NCCL_LIMIT_S = 520.0, 410.0  # for all rows
NCCL_COMMAND_S = 60.0 * PATIENCE  # for one command
LEAST_S = 5.0  # no row starts with less time left


@dataclass(frozen=True)
class Seen:
    """The result of one row."""

    name: str
    result: str  # pass, FAIL, not run, needs a GPU, no time left
    told: str
    seconds: float


def see(row: Row, machine: Machine, *, may_pretend: bool = True) -> Seen:
    """Run one row; a failure must not stop the others."""
    began = time.monotonic()
    if not HAS_GPU and (row.needs_gpu or not may_pretend):
        return Seen(row.name, "needs a GPU", "", 0.0)
    if machine.left() < LEAST_S:
        return Seen(row.name, "no time left", "", 0.0)
    try:
        result, told = "pass", row.see(machine)
    except CannotRun as reason:
        result, told = "not run", str(reason)
    except Failed as failure:
        result, told = "FAIL", str(failure)
    except Exception as error:
        result, told = "FAIL", f"{type(error).__name__}: {error}"
    return Seen(row.name, result, " ".join(told.split()), time.monotonic() - began)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu")
    parser.add_argument("--nccl", action="store_true", help="the rows of make test-nccl")
    parser.add_argument("--pretend", action="store_true", help="with gloo in NCCL's place")
    parser.add_argument("--json", type=Path, help="a file for the table")
    parser.add_argument("--keep", type=Path, help="a folder for the output and logs of all runs")
    parser.add_argument("--seconds", type=float, help="for all rows")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    if args.pretend and HAS_GPU:
        parser.error("--pretend is for machines without a GPU; set CUDA_VISIBLE_DEVICES=")
    return args


def main() -> int:
    """Run the rows, print the table and write it as JSON; returns the exit code."""
    args = parse()
    limit_s, command_s = (NCCL_LIMIT_S, NCCL_COMMAND_S) if args.nccl else (LIMIT_S, COMMAND_S)
    rows = NCCL if args.nccl else ROWS
    chosen = [one for one in rows if not args.words or any(word in one.name for word in args.words)]
    found = []
    with tempfile.TemporaryDirectory(prefix="test-gpu-", ignore_cleanup_errors=True) as name:
        folder = (args.keep or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        machine = Machine(folder, args.seconds or limit_s, command_s)
        if args.json and not args.keep:
            machine.blocks = args.json.resolve().with_suffix(".blocks")
        for one in chosen:
            found.append(see(one, machine, may_pretend=args.pretend or not args.nccl))
            print(f"{found[-1].result:<12} {one.name}: {found[-1].told}", flush=True)
            if args.json:
                args.json.write_text(json.dumps([asdict(seen) for seen in found], indent=2))
    print_table(
        found, f"make test-nccl{' PRETEND=1' * args.pretend}" if args.nccl else "make test-gpu"
    )
    counts = Counter(one.result for one in found)
    others = len(found) - counts["pass"] - counts["FAIL"]
    print(f"{counts['pass']} passed, {counts['FAIL']} failed, {others} not run")
    return int(counts["FAIL"] > 0)


def print_table(found: list[Seen], command: str) -> None:
    rows = [[one.name, one.result, one.told, f"{one.seconds:.0f}"] for one in found]
    gpu = torch.cuda.get_device_name() if HAS_GPU else "no GPU"
    about = f"{describe_machine(command)}, torch {torch.__version__}, {gpu}"
    print(f"\n{about}\n\n{render(['row', 'result', 'seen', 's'], rows)}\n")


if __name__ == "__main__":
    sys.exit(main())
