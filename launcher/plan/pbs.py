"""PBS: the nodes of a job, and the command that asks for one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.plan.plan import NodePlan, PlanError


def read_nodefile(environ: Mapping[str, str], nproc: int | None) -> tuple[NodePlan, ...]:
    """Return a PBS job's nodes, each with as many ranks as the node file has lines for it.

    Raises PlanError where this is no PBS job.
    """
    file = Path(environ.get("PBS_NODEFILE") or "/nonexistent")
    if not environ.get("PBS_JOBID") or not file.is_file():
        raise PlanError("this is no PBS job; use qsub")
    lines = file.read_text().split()
    several = {name: lines.count(name) for name in lines if lines.count(name) > 1}
    return tuple(NodePlan(name, nproc or several.get(name)) for name in dict.fromkeys(lines))


def job_command(script: str, typed: Sequence[str]) -> list[str]:
    """Return the qsub command for what was typed; -V forwards the variables."""
    arguments = ["-F", shlex.join(typed[1:])] if typed[1:] else []
    return ["qsub", "-V", *arguments, script]
