"""The commands that submit a job to SLURM or PBS, for resume lines and for --dry-run.

`run` is the fan-out of a batch script that runs with --dry-run outside a job.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.plan.plan import Plan, print_plan, read_nproc
from launcher.plan.scheduler import Allocation, tasks_per_node

JOB_ID = "<job id>"
_NODES = re.compile(r"(?:--nodes=|-N ?|select=|nodes=)(\d+)")
_TASKS = re.compile(r"--ntasks-per-node=(\d+)")
_GPUS = re.compile(r"(?:--gpus-per-node=|--gres=gpu:|n?gpus=)(?:[a-z]\w*:)?(\d+)")


def run(plan: Plan, _be_ready: Callable[[], None]) -> int:
    """Print what is known of the job before it starts, and the command that submits it."""
    counts = plan.rank_counts(plan.nproc) if plan.nproc else []
    backend = plan.backend.replace("auto", "nccl with GPUs, else gloo")
    plan = replace(plan, run_id=plan.run_id or JOB_ID, backend=backend)
    print_plan(plan, None, None, counts)
    print("# the command that submits this; options of the scheduler go before the script")
    print(f"cd {shlex.quote(str(plan.directory))} && {plan.command}")
    return 0


def read_script(file: Path, nproc: int | None) -> Allocation:
    """Return the nodes and ranks that the #SBATCH or #PBS lines of a batch script ask for.

    Args:
        nproc: ranks per node that the user asked for.
    """
    lines = re.findall(r"^#(?:SBATCH|PBS) (.*?)(?: #.*)?$", file.read_text(), re.MULTILINE)
    nodes, tasks, gpus = (_last(pattern, lines) for pattern in (_NODES, _TASKS, _GPUS))
    ranks = tasks if tasks > 1 else nproc or gpus
    return Allocation(
        num_nodes=nodes or 1,
        master_addr="",
        nproc=read_nproc("", str(ranks)) if nodes and ranks else None,
        hosts="chosen by the scheduler when the job starts",
    )


def _last(pattern: re.Pattern[str], lines: Sequence[str]) -> int:
    found = [int(match[1]) for line in lines if (match := pattern.search(line))]
    return found[-1] if found else 0


def pbs_command(script: str, typed: Sequence[str]) -> list[str]:
    """Return the qsub command for what was typed; -V forwards the variables."""
    arguments = ["-F", shlex.join(typed[1:])] if typed[1:] else []
    return ["qsub", "-V", *arguments, script]


def slurm_command(
    environ: Mapping[str, str], script: str | None, typed: Sequence[str]
) -> list[str]:
    """Return the command that runs what was typed in a job of the same size, from any shell.

    Args:
        script: the batch script of this project; None if another script was typed.
    """
    if not environ.get("SLURM_JOB_ID"):
        return ["sbatch", script or typed[0], *typed[1:]]
    words = [f"--nodes={environ['SLURM_JOB_NUM_NODES']}"]
    if tasks := tasks_per_node(environ):
        words.append(f"--ntasks-per-node={tasks}")
    if gpus := environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE"):
        words.append(f"--gpus-per-node={gpus}")
    is_batch = "SLURM_PROCID" in environ and "SLURM_STEP_ID" not in environ
    if is_batch:
        return ["sbatch", *words, script, *typed[1:]] if script else list(typed)
    return ["salloc", *words, *([] if gpus else _gres(environ["SLURM_JOB_ID"])), *typed]


def _gres(job: str) -> list[str]:
    """Return the --gres option of a job; salloc sets no variable for it."""
    command = ["squeue", "--noheader", f"--job={job}", "--format=%b"]
    try:
        answer = subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=10.0
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return []
    return [f"--gres={answer.removeprefix('gres:')}"] if answer.startswith("gres:") else []
