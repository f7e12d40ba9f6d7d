"""Rejects a launcher that mpiexec has started several times."""

from distributed.environment import LAUNCHERS
from launcher.text import Environ, PlanError


def refuse_copies(environ: Environ) -> None:
    """Raise PlanError if mpiexec started several copies of this program, each training separately.

    Under srun, the step's own variables identify the nodes. RANK is not an MPI's.
    """
    marks = [name for name in LAUNCHERS if name != "RANK" and environ.get(name)]
    if not marks or marks[0] == "SLURM_STEP_ID":
        return

    rank = marks[0]  # the variable with the rank of this copy; `size` has the number of copies
    size = rank.replace("_RANK", "_SIZE") if "_COMM_WORLD_" in rank else "PMI_SIZE"
    if rank == "FLUX_TASK_RANK":
        size = "FLUX_JOB_SIZE"
    if environ.get(size, "1") != "1":
        raise PlanError(
            f"mpiexec started the launcher {environ[size]} times ({size}), each as a separate run; "
            f"start it once, without mpiexec; for separate runs, unset {size}",
            "wrong-world",
        )
