"""A dry run of a batch script outside a job: show the command that submits the script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.plan.plan import Plan, World, print_plan, read_nproc

_NODES = re.compile(r"(?:--nodes=|-N ?|select=|nodes=)(\d+)")
_TASKS = re.compile(r"--ntasks-per-node=(\d+)")
_GPUS = re.compile(r"(?:--gpus-per-node=|--gres=gpu:|n?gpus=)(?:[a-z]\w*:)?(\d+)")


def run(plan: Plan, _be_ready: Callable[[], None]) -> int:
    """Print what is known about the job before it starts, and the command that submits it."""
    counts = plan.rank_counts(plan.nproc) if plan.nproc else []
    backend = plan.backend.replace("auto", "nccl with GPUs, else gloo")
    plan = replace(plan, run_id=plan.run_id or "<job id>", backend=backend)
    print_plan(plan, None, None, counts)
    size = "; set the job's size in the command" * plan.program.startswith("pbs")
    print(f"# the command that submits this{size}; scheduler options go before the script")
    print(f"cd {shlex.quote(str(plan.directory))} && {plan.command}")
    return 0


def read_script(file: Path, nproc: int | None) -> World:
    """Return the nodes and ranks that the #SBATCH or #PBS lines of a batch script ask for.

    `nproc` is the number of ranks per node that the user asked for.
    """
    lines = re.findall(
        r"^#(?:SBATCH|PBS) (.*?)(?: #.*)?$", file.read_text(errors="replace"), re.MULTILINE
    )
    nodes, tasks, gpus = (_last(pattern, lines) for pattern in (_NODES, _TASKS, _GPUS))
    ranks = tasks if tasks > 1 else nproc or gpus
    asked = read_nproc("", str(ranks)) if nodes and ranks else None
    hosts = "chosen by the scheduler when the job starts"
    return World(num_nodes=nodes or 1, master_addr="", nproc=asked, hosts=hosts)


def _last(pattern: re.Pattern[str], lines: Sequence[str]) -> int:
    numbers = [int(match[1]) for line in lines if (match := pattern.search(line))]
    return numbers[-1] if numbers else 0
