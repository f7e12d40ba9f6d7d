"""The part of a job that a run leaves idle."""

from distributed.job import in_slurm_step, is_task
from launcher.plan import pbs
from launcher.plan.plan import Plan
from launcher.text import Environ, whole


def find_idle(plan: Plan) -> str:
    """Return a line about nodes or GPUs of the job that this run does not use; empty if none.

    The fault's name ends the line. Also empty in a task of a SLURM step, whose size the user chose,
    and in a dry run of a batch script outside a job. Spares count as used; of a step, only nodes
    are compared.
    """
    environ = plan.environ
    if is_task(environ) or plan.fanout == "job_command":
        return ""

    part = "step" if in_slurm_step(environ) else "job"  # a step: in a shell of it
    cure = "run_ddp.sh uses all of them"
    if part == "step":
        cure = "give each node a task: srun --overlap"
    elif plan.program in ("run_ddp.sh", "launch_distributed_train.sh"):
        cure = "omit -n and NPROC_PER_NODE to use all of them"

    nodes, gpus = _size(environ)
    if plan.num_agents < nodes:
        used = f"{plan.num_agents} of the {part}'s {nodes} nodes"
        return f"this run uses {used}; {cure} [partial-launch]"
    nproc = min(plan.rank_counts(gpus))  # where no number was given, one rank per GPU
    if nproc < gpus:
        used = f"{nproc} of the job's {gpus} GPUs on each node"
        return f"this run uses {used}; {cure} [partial-launch]"
    return ""


def _size(environ: Environ) -> tuple[int, int]:
    """Return the step's or job's number of nodes, and of GPUs on each; 0 for what is not known."""
    if in_slurm_step(environ):
        return int(environ["SLURM_STEP_NUM_NODES"]), 0
    if environ.get("SLURM_JOB_ID"):
        per_node = environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]  # a100:2
        given = environ.get("SLURM_GPUS_ON_NODE") or per_node  # salloc's shell has only the latter
        return whole(environ.get("SLURM_JOB_NUM_NODES", "")), whole(given)
    nodes = pbs.count_nodes(environ)
    # Torque's file has a line for each GPU.
    return nodes, len(pbs.read_lines(environ, "PBS_GPUFILE")) // max(nodes, 1)
