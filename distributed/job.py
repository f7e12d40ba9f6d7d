"""The SLURM or PBS job that this process belongs to, and its step (no torch)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from . import limits

_INTERACTIVE_STEP = "4294967290"  # SLURM_STEP_ID in the shell that salloc opens on a node


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process; the shell that salloc opens does not count."""
    return environ.get("SLURM_STEP_ID", "") not in ("", _INTERACTIVE_STEP)


def is_task(environ: Mapping[str, str]) -> bool:
    """Return whether this is a task of a step, rather than a command typed in a task's shell.

    With `srun -n2 --pty bash`, the shell of the first task gets the terminal; the other shells have
    no input and exit at once.
    """
    if not in_slurm_step(environ):
        return False
    is_first = environ.get("SLURM_PTY_PORT") and environ.get("SLURM_PROCID") == "0"
    # In a step of one task, a command in its shell is one process in either case.
    if not is_first or environ.get("SLURM_STEP_NUM_TASKS") == "1":
        return True

    try:
        task = Path("/proc", environ.get("SLURM_TASK_PID") or "-", "cmdline").read_bytes()
    except OSError:  # /proc does not show the task's first process
        return True
    arguments = task.split(b"\0")[1:-1]  # each ends with a zero byte
    # An interactive shell has only options, if any; a task names a script or a command.
    return not task or any(not word.startswith(b"-") for word in arguments)


def job_id(environ: Mapping[str, str]) -> str:
    """Return the SLURM or PBS job's id, or ""; each task of a SLURM array has its own."""
    array = environ.get("SLURM_ARRAY_JOB_ID")
    task = environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID") or environ.get("PBS_JOBID") or ""


def job_run_id(environ: Mapping[str, str]) -> str:
    """Return the run id derived from the job; each step after the first has its own."""
    job = job_id(environ)
    step = environ.get("SLURM_STEP_ID", "")
    return f"{job}.{step}" if in_slurm_step(environ) and step != "0" else job


def this_job(environ: Mapping[str, str]) -> dict[str, str | int]:
    """Return what identifies this start of this SLURM or PBS job, or {}.

        job         the job's id; of a task of an array, its own
        run_id      the same; of a task of a SLURM array, ARRAY_TASK
        start       how many times the scheduler has restarted the job
        cluster     SLURM's cluster, or "" without a name; the PBS server
        submitted   the job's submit time as text; "" if squeue does not answer

    A requeued job keeps its id and gets the next start count; SLURM gives it a new submit time.
    Another job can have the same id, on another cluster or after the scheduler was reset.

    Under SLURM, this asks squeue, and waits up to SCHEDULER_S seconds. In a PBS job, it does not
    ask: on nodes reached by ssh, PBS does not answer. The launcher asks PBS for all nodes, and puts
    the answer into LAUNCH_JOB. The result is {} outside a job, and in a PBS job without LAUNCH_JOB.
    """
    if given := environ.get("LAUNCH_JOB"):
        return dict(json.loads(given))
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return {}

    run_id = job_id(environ)
    ask_for_time = f"env SLURM_TIME_FORMAT=standard squeue -h -j {run_id} -o %V"
    return {
        "job": job,
        "run_id": run_id,
        "start": int(environ.get("SLURM_RESTART_COUNT") or 0),
        "cluster": environ.get("SLURM_CLUSTER_NAME", ""),
        "submitted": (ask_scheduler(*ask_for_time.split()) or "").strip(),
    }


def ask_scheduler(*command: str, limit_s: float = limits.SCHEDULER_S) -> str | None:
    """Return what a SLURM or PBS command prints; None if it fails or takes over `limit_s` seconds.

    It fails in a container that lacks the command. The user's SQUEUE_* and SINFO_* variables, which
    filter and format the answers, have no effect. After SCHEDULER_SILENT_S seconds without an
    answer, prints a line on stderr.
    """
    import subprocess  # slower to import than the rest of this module, and rarely needed
    import threading

    text = [f"waiting up to {limit_s:g} s for {' '.join(command)}"]
    notice = threading.Timer(limits.SCHEDULER_SILENT_S, print, text, {"file": sys.stderr})
    notice.start()
    # A shell can unset variables by the beginning of their names; -p: read no file ($BASH_ENV).
    ask = 'unset "${!SQUEUE_@}" "${!SINFO_@}"; exec "$0" "$@"'
    try:
        return subprocess.check_output(
            ["bash", "-p", "-c", ask, *command],
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            errors="surrogateescape",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    finally:
        notice.cancel()
