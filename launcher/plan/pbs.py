"""PBS: the nodes of a job, and the command that asks for one."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.plan.plan import NodePlan, PlanError
from launcher.text import count

REQUEST = (
    "ask for nodes with qsub -l select=2:ncpus=16:ngpus=4 (PBS Pro, OpenPBS)"
    " or qsub -l nodes=2:ppn=4 (Torque)"
)
KILL_DELAY_S = 10  # between PBS's SIGTERM and SIGKILL, where the queue sets no other
REPORT_S = 5  # after GRACE, for the launcher to end the nodes and to say how the run ended


def read_nodefile(environ: Mapping[str, str], nproc: int | None) -> tuple[NodePlan, ...]:
    """Return a PBS job's nodes, each with as many ranks as the node file has lines for it.

    Raises PlanError where this is no PBS job, or not one of the size that was asked for.
    """
    if not environ.get("PBS_JOBID"):
        raise PlanError(f"this is no PBS job; {REQUEST}")
    file = Path(environ.get("PBS_NODEFILE") or "/nonexistent")
    lines = file.read_text().split() if file.is_file() else []
    there, asked = len({*lines}), environ.get("PBS_NUM_NODES") or "some"  # Torque's
    if not lines or (asked.isdecimal() and int(asked) != there):
        cause = f"the job's node file names {count(there, 'node')} where {asked} should be"
        raise PlanError(f"{cause}; {REQUEST}")
    several = {name: lines.count(name) for name in lines if lines.count(name) > 1}
    return tuple(NodePlan(name, nproc or several.get(name)) for name in dict.fromkeys(lines))


def ask_qstat(name: str, option: str = "-f") -> dict[str, str]:
    """Return a job's attributes, or with -Qf a queue's; none where PBS does not answer."""
    command = ["qstat", option, name]
    try:
        text = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=10, text=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = text.replace("\n\t", "").splitlines()  # it folds what is long
    return dict(line.strip().split(" = ", 1) for line in lines if " = " in line)


def find_short_delay(grace_s: int, environ: Mapping[str, str]) -> str:
    """Return a line where PBS kills this job while its ranks may still save; empty: it does not."""
    queue = environ.get("PBS_QUEUE", "")
    told = ask_qstat(queue, "-Qf") if queue and environ.get("PBS_JOBID") else {}
    delay = told.get("kill_delay", str(KILL_DELAY_S)) if told else ""
    if not delay.isdecimal() or grace_s + REPORT_S <= int(delay):
        return ""
    cause = f"GRACE is {grace_s}, but PBS kills this job {delay} s after qdel or the walltime"
    cure = f"ask your administrator for kill_delay={grace_s + REPORT_S}"
    if (rest_s := int(delay) - REPORT_S) > 0:
        cure += f", or set GRACE={rest_s} if the ranks save within {rest_s} s"
    return f"{cause} (kill_delay of queue {queue}); {cure}"


def job_command(script: str, typed: Sequence[str]) -> list[str]:
    """Return the qsub command for what was typed; -V forwards the variables."""
    arguments = ["-F", shlex.join(typed[1:])] if typed[1:] else []
    return ["qsub", "-V", *arguments, script]
