"""The part of a job that a run leaves idle."""

from distributed.job import in_slurm_step, is_task
from launcher.plan import pbs
from launcher.plan.plan import Plan
from launcher.text import Environ, whole


def find_idle(plan: Plan) -> str:
    """Return a line about nodes or GPUs of the job that this run does not use; empty if none.

    Also empty in a task of a SLURM step, whose size the user chose, and in a dry run of a batch
    script outside a job. Spares count as used.
    """
    environ = plan.environ
    if is_task(environ) or plan.fanout == "job_command":
        return ""

    if in_slurm_step(environ):  # in a shell of the step
        nodes = int(environ["SLURM_STEP_NUM_NODES"])
        cure = "give each node a task: srun --overlap [partial-launch]"
        text = f"this run uses {plan.num_agents} of the step's {nodes} nodes; {cure}"
        return text if plan.num_agents < nodes else ""

    nodes, gpus = _job_size(environ)
    cure = "run_ddp.sh uses all of them [partial-launch]"
    if plan.program in ("run_ddp.sh", "launch_distributed_train.sh"):
        cure = "omit -n and NPROC_PER_NODE to use all of them [partial-launch]"

    if plan.num_agents < nodes:
        return f"this run uses {plan.num_agents} of the job's {nodes} nodes; {cure}"
    nproc = min(plan.rank_counts(gpus))  # where no number was given, one rank per GPU
    if nproc < gpus:
        return f"this run uses {nproc} of the job's {gpus} GPUs on each node; {cure}"
    return ""


def _job_size(environ: Environ) -> tuple[int, int]:
    """Return the job's number of nodes, and of GPUs on each; 0 for what is not known."""
    if environ.get("SLURM_JOB_ID"):
        per_node = environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]  # a100:2
        given = environ.get("SLURM_GPUS_ON_NODE") or per_node  # salloc's shell has only the latter
        sizes = (environ.get("SLURM_JOB_NUM_NODES", ""), given)
        nodes, gpus = map(whole, sizes)
        return nodes, gpus
    nodes = pbs.count_nodes(environ)
    cards = pbs.read_lines(environ, "PBS_GPUFILE")
    return nodes, len(cards) // max(nodes, 1)  # Torque's file has a line for each GPU
