"""What SLURM says about this process: its job, its step, or a login node."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distributed import environment, hostlist
from distributed.environment import in_slurm_step
from launcher.plan.plan import PlanError


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job or a step."""

    num_nodes: int
    master_addr: str
    node_rank: int = 0
    nproc: int | None = None  # tasks per node, where the user asked for several
    hosts: str = ""  # SLURM's list of them


def in_slurm_job(environ: Mapping[str, str]) -> bool:
    """Return whether this runs in a job outside its steps: a batch script, salloc's shell."""
    return bool(environ.get("SLURM_JOB_ID")) and not in_slurm_step(environ)


def read_job(environ: Mapping[str, str], script: str, asked: int | None) -> Allocation:
    """Return the nodes of a job, with the first as master, and the ranks per node.

    Args:
        script: the entry script, as it was typed.
        asked: ranks per node that the user asked for.

    Raises:
        PlanError: this is not a job, or the scripts cannot use it.
    """
    num_nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    if not environ.get("SLURM_JOB_ID") or not num_nodes:
        raise PlanError(f"this is no SLURM job; use sbatch {script}, or salloc first")
    if in_slurm_step(environ):
        raise PlanError(f"srun started {script}, which starts srun itself; leave srun out")
    if environ.get("SLURM_HET_SIZE"):
        cause = "a heterogeneous job has nodes that differ, and this starts the same on each"
        cure = "leave out the : and what follows, or start train.py with srun --het-group"
        raise PlanError(f"{cause}; {cure} [wrong-world]")
    nproc = tasks_per_node(environ)
    if nproc and asked not in (None, nproc):
        cause = f"{asked} processes per node, but the job has SLURM_TASKS_PER_NODE={nproc}"
        raise PlanError(f"{cause}; leave the number out [wrong-world]")
    nodes = environ["SLURM_JOB_NODELIST"]
    return Allocation(int(num_nodes), hostlist.first(nodes), nproc=nproc, hosts=nodes)


def tasks_per_node(environ: Mapping[str, str]) -> int | None:
    """Return the tasks per node that the user asked for, if they are more than one.

    Raises:
        PlanError: the nodes have different numbers of tasks.
    """
    if not environ.get("SLURM_NTASKS"):  # the other variable only counts the processors then
        return None
    text = environ.get("SLURM_TASKS_PER_NODE", "1")
    tasks, *others = {*environment.tasks_per_node(text, "SLURM_TASKS_PER_NODE")}
    if others:
        cause = f"the job has unequal nodes, SLURM_TASKS_PER_NODE={text}"
        raise PlanError(f"{cause}; give sbatch --ntasks-per-node [wrong-world]")
    return tasks if tasks > 1 else None


def read_step(environ: Mapping[str, str], typed: Mapping[str, str | None]) -> Allocation:
    """Return the nodes and this node's rank from a step with one task per node.

    Args:
        typed: the arguments NUM_NODES, NODE_RANK and MASTER_ADDR; None where not given.

    Raises:
        PlanError: the step has several tasks per node, or an argument contradicts it.
    """
    tasks, nodes = environ["SLURM_STEP_NUM_TASKS"], environ["SLURM_STEP_NUM_NODES"]
    if tasks != nodes:
        cure = f"give it --ntasks={nodes} --ntasks-per-node=1"
        raise PlanError(f"srun started {tasks} tasks on {nodes} nodes; {cure} [wrong-world]")
    for name, variable in (("NUM_NODES", "SLURM_STEP_NUM_NODES"), ("NODE_RANK", "SLURM_NODEID")):
        if typed[name] not in (None, environ[variable]):
            cause = f"the argument {name} is {typed[name]!r} but srun's {variable}"
            cure = "leave the argument out (the batch shell may have expanded it)"
            raise PlanError(f"{cause} is {environ[variable]}; {cure} [wrong-world]")
    master = typed["MASTER_ADDR"] or environ.get("MASTER_ADDR")
    master = master or hostlist.first(environ["SLURM_STEP_NODELIST"])
    return Allocation(int(nodes), master, node_rank=int(environ["SLURM_NODEID"]))


def refuse_batch_step(environ: Mapping[str, str], program: str) -> None:
    """Raise PlanError in a job of several nodes if srun did not start this process."""
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    if environ.get("SLURM_JOB_ID") and nodes != "1":
        cause = f"the job has {nodes} nodes and no srun started {program} on them"
        raise PlanError(f"{cause}; use srun scripts/cluster_train.sh CONFIG [batch-step]")


def refuse_many_nodes(environ: Mapping[str, str], program: str) -> None:
    """Raise PlanError if the step, or else the job, has several nodes."""
    nodes = "1"
    if in_slurm_step(environ):
        nodes = environ.get("SLURM_STEP_NUM_NODES") or "1"
    elif environ.get("SLURM_JOB_ID"):
        nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    if nodes != "1":
        cause = f"this allocation has {nodes} nodes and {program} starts one"
        raise PlanError(f"{cause}; use srun scripts/cluster_train.sh CONFIG")


def is_login_node(environ: Mapping[str, str]) -> bool:
    """Return whether a batch system answers here and this is outside its jobs."""
    if environ.get("SLURM_JOB_ID") or environ.get("PBS_JOBID"):
        return False
    return any(_answers(command) for command in (["sinfo"], ["qstat"]))


def _answers(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=3).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
