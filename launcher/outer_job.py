"""A launch in a SLURM job that was submitted in another job's shell: it inherits nothing of it."""

import re

from distributed.environment import tasks_per_node
from distributed.job import ask_scheduler
from launcher.outer_run import remove_variables
from launcher.proc import read_proc
from launcher.processes import PARENT, read_stat
from launcher.text import OwnEnviron, whole

_OF_A_STEP = "SLURM_(STEP|SRUN|PTY|LAUNCH|DISTRIBUTION)"
_OF_A_TASK = f"{_OF_A_STEP}|SLURM_(PROCID|NODEID|LOCALID|TASK_PID|GPUS_ON_NODE)"
_RECORDED = {  # what the record of a job contains if these variables are its own
    "SLURM_ARRAY": r"\bArrayTaskId=",
    "SLURM_HET": r"\bHetJobId=",
    "SLURM_RESTART": r"\bRestarts=[1-9]",
    "SLURM_GPUS_PER_NODE": r"\bTres\w+=\S*gpu",
}


def leave_outer_job(environ: OwnEnviron) -> None:
    """Remove the variables of the outer job: sbatch and salloc pass on those of their shell.

    May wait for scontrol. Raises LauncherError if SLURM_TASKS_PER_NODE cannot be read.
    """
    job = environ.get("SLURM_JOB_ID", "")
    owner, step = _read_owner(environ.get("SLURM_TASK_PID", ""))
    # The components of a heterogeneous job have ids of their own.
    if owner not in ("", job) and "SLURM_HET_SIZE" not in environ:
        remove_variables(_OF_A_TASK, environ)
    elif step == "batch":
        remove_variables(_OF_A_STEP, environ)
    if "SLURM_STEP_ID" in environ:  # srun has set the rest for its step
        return

    tasks = tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "1"), "SLURM_TASKS_PER_NODE")
    if environ.get("SLURM_NTASKS") not in (None, str(sum(tasks))):  # the outer job's
        remove_variables("SLURM_N(TASKS|PROCS)", environ)
    if environ.get("SLURM_CPUS_PER_TASK") == "1":  # SLURM's change of the outer job's
        remove_variables("SLURM_CPUS_PER_TASK", environ)
    _remove_unrecorded(job, environ)


def _remove_unrecorded(job: str, environ: OwnEnviron) -> None:
    """Remove variables that SLURM sets only for some jobs, unless scontrol shows that `job` is one.

    Such jobs are an array's tasks, for example. Without such variables, scontrol is not asked.
    """
    signs = dict(_RECORDED)
    if environ.get("SLURM_GPUS_ON_NODE"):  # a job without GPUs does not have it
        del signs["SLURM_GPUS_PER_NODE"]
    if any(name.startswith((*signs,)) for name in environ):
        record = ask_scheduler("scontrol", "show", "job", "-o", job)
        for beginning, sign in signs.items():
            if record and not re.search(sign, record):
                remove_variables(beginning, environ)


def _read_owner(process: str) -> tuple[str, str]:
    """Return the job and the step of a job's script or of a task; empty if unknown.

    `process` is its process id. Its parent, slurmstepd, shows them in its title: [12.batch] or
    [12.0].
    """
    stat = read_stat(whole(process))
    title = read_proc(int(stat[PARENT]), "cmdline").decode(errors="replace") if stat else ""
    found = re.search(r"\[(\d+)\.(\w+)", title)
    return (found[1], found[2]) if found else ("", "")
