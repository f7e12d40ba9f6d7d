"""Which launcher started this process, and its place among the others.

    python -m distributed.environment port ID     the port that belongs to a run id
    python -m distributed.environment new-id      a fresh run id

The only reader of the process environment in this package. No torch import, so it is instant.
"""

from __future__ import annotations

import os
import re
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from distributed import hostlist

PORTS = range(10_000, 32_768)  # above the privileged ports, below Linux's ephemeral range
INTERACTIVE_STEP = "4294967290"  # SLURM_STEP_ID in the shell that salloc opens on a node


class LauncherError(ValueError):
    """What the launcher gave cannot be right: `fault: cause; cure`, in one line."""

    def __init__(self, text: str, fault: str = "wrong-world") -> None:
        super().__init__(f"{fault}: {text}")
        self.fault = fault


@dataclass(frozen=True)
class Environment:
    """One process's place in the run. Ranks and sizes count processes, node ranks count hosts."""

    launcher: str  # "torchrun", "launch", "slurm", "openmpi" or "plain"
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    # What no launcher has a word in; detect() adds it.
    run_id: str = ""
    log_dir: Path = Path("logs")
    restart_count: int = 0
    agent_store: bool = False  # the node agent already serves the store on the master's port
    heartbeat_file: str | None = None
    backend: str | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is global rank 0, which alone logs and saves."""
        return self.rank == 0


class _Variables:
    """The environment of one process, with readers that say what is wrong and how to cure it."""

    def __init__(self, environ: Mapping[str, str], local_rank: int | None) -> None:
        self.environ = environ
        self.local_rank = local_rank

    def get(self, name: str) -> str | None:
        """Return the value, or None where it is unset or empty."""
        return self.environ.get(name) or None

    def text(self, name: str, cure: str) -> str:
        value = self.get(name)
        if value is None:
            raise LauncherError(f"{name} is not set; {cure}")
        return value

    def number(self, name: str, low: int, high: int, cure: str, *, why: str = "") -> int:
        """Return an integer of low..high; `why` says where the bounds come from."""
        value = self.text(name, cure)
        if not (value.isascii() and value.isdigit() and low <= int(value) <= high):
            raise LauncherError(f"{name}={value} is not a number of {low}..{high}{why}; {cure}")
        return int(value)

    def size(self, name: str, cure: str) -> int:
        return self.number(name, 1, 2**31, cure)

    def rank(self, name: str, size_name: str, size: int, cure: str) -> int:
        return self.number(name, 0, size - 1, cure, why=f" ({size_name}={size})")

    def port(self, cure: str) -> int:
        return self.number("MASTER_PORT", 1, 2**16 - 1, cure)

    def run_id(self) -> str:
        elastic_id = self.get("TORCHELASTIC_RUN_ID")
        return (
            self.get("RUN_ID")
            or (elastic_id if elastic_id != "none" else None)  # torchrun's "no id was given"
            or self.job_id()
            or self.get("PBS_JOBID")
            or new_run_id()
        )

    def job_id(self) -> str | None:
        """Return SLURM's job id; the tasks of an array get one each."""
        array, task = self.get("SLURM_ARRAY_JOB_ID"), self.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else self.get("SLURM_JOB_ID")


def torchrun(v: _Variables) -> Environment | None:
    """Read what torchrun, our node agent, torch.distributed.launch and hand-made starts set."""
    if v.get("RANK") is None:
        return None
    cure = "torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT together"
    world_size = v.size("WORLD_SIZE", cure)
    rank = v.rank("RANK", "WORLD_SIZE", world_size, cure)
    local_rank = _agreed_local_rank(v, cure)
    if v.get("LOCAL_WORLD_SIZE"):
        local_world_size = v.size("LOCAL_WORLD_SIZE", cure)
    elif rank == local_rank:
        local_world_size = world_size  # started by hand, all on this machine
    else:
        raise LauncherError(
            f"RANK={rank} is not LOCAL_RANK={local_rank}, so there are several nodes; "
            "set LOCAL_WORLD_SIZE, the number of ranks on this one"
        )
    if local_rank >= local_world_size:
        raise LauncherError(
            f"LOCAL_RANK={local_rank} is not below LOCAL_WORLD_SIZE={local_world_size}; {cure}"
        )
    if v.get("GROUP_WORLD_SIZE"):
        num_nodes = v.size("GROUP_WORLD_SIZE", cure)
        node_rank = v.rank("GROUP_RANK", "GROUP_WORLD_SIZE", num_nodes, cure)
    else:
        num_nodes, node_rank = _equal_nodes(rank, local_rank, world_size, local_world_size)
    return Environment(
        "torchrun" if v.local_rank is None else "launch",
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=v.text("MASTER_ADDR", cure),
        master_port=v.port(cure),
    )


def _agreed_local_rank(v: _Variables, cure: str) -> int:
    """Return the local rank from LOCAL_RANK, from the argument, or from both where they agree."""
    if v.local_rank is None:
        return v.number("LOCAL_RANK", 0, 2**31, cure)
    if v.get("LOCAL_RANK") not in (None, str(v.local_rank)):
        raise LauncherError(
            f"LOCAL_RANK={v.get('LOCAL_RANK')} but --local-rank is {v.local_rank}; give only one"
        )
    return v.local_rank


def _equal_nodes(
    rank: int, local_rank: int, world_size: int, local_world_size: int
) -> tuple[int, int]:
    """Return (number of nodes, node rank) where every node runs the same number of ranks."""
    return -(-world_size // local_world_size), (rank - local_rank) // local_world_size


def slurm(v: _Variables) -> Environment | None:
    """Read the variables of one task of a SLURM step, started as `srun python train.py`.

    The step's own variables, for those of the job still name the whole job in a smaller step.
    """
    if v.get("SLURM_JOB_ID") is None:
        return None
    if v.get("SLURM_STEP_ID") in (None, INTERACTIVE_STEP):
        _refuse_lone_task(v)
        return None
    cure = "start the ranks with srun, which sets every SLURM_STEP_* variable"
    world_size = v.size("SLURM_STEP_NUM_TASKS", cure)
    num_nodes = v.size("SLURM_STEP_NUM_NODES", cure)
    node_rank = v.rank("SLURM_NODEID", "SLURM_STEP_NUM_NODES", num_nodes, cure)
    tasks = tasks_per_node(v.text("SLURM_STEP_TASKS_PER_NODE", cure))
    if len(tasks) != num_nodes:
        raise LauncherError(
            f"SLURM_STEP_TASKS_PER_NODE={v.get('SLURM_STEP_TASKS_PER_NODE')} "
            f"but SLURM_STEP_NUM_NODES={num_nodes}; {cure}"
        )
    if v.get("WORLD_SIZE") not in (None, str(world_size)):
        raise LauncherError(
            f"WORLD_SIZE={v.get('WORLD_SIZE')} but SLURM_STEP_NUM_TASKS={world_size}; "
            "unset WORLD_SIZE, or ask srun for that many tasks"
        )
    step = f"{v.job_id()}.{v.get('SLURM_STEP_ID')}"
    return Environment(
        "slurm",
        rank=v.rank("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", world_size, cure),
        local_rank=v.rank("SLURM_LOCALID", "tasks on this node", tasks[node_rank], cure),
        world_size=world_size,
        local_world_size=tasks[node_rank],
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=v.get("MASTER_ADDR") or hostlist.first(v.text("SLURM_STEP_NODELIST", cure)),
        master_port=v.port(cure) if v.get("MASTER_PORT") else port_from_id(step),
    )


def _refuse_lone_task(v: _Variables) -> None:
    """Raise where this process would be one of several tasks that nobody started."""
    job_tasks = int(v.get("SLURM_NTASKS") or v.get("SLURM_JOB_NUM_NODES") or 1)
    if v.get("SLURM_STEP_ID") == INTERACTIVE_STEP:
        where, started = "salloc's shell", int(v.get("SLURM_STEP_NUM_TASKS") or 1)
    else:
        where, started = "the batch step", 1
    if started < job_tasks:
        raise LauncherError(
            f"this is {where} of job {v.job_id()}, which has {job_tasks} tasks, and no other rank "
            "is started; put srun before the command",
            fault="batch-step",
        )


def tasks_per_node(text: str) -> list[int]:
    """Expand SLURM's short form: `2(x2),1` is [2, 2, 1]."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", item)
        if match is None:
            cure = "start the ranks with srun"
            raise LauncherError(f"SLURM_STEP_TASKS_PER_NODE={text} cannot be read; {cure}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def openmpi(v: _Variables) -> Environment | None:
    """Read what Open MPI's mpirun sets. Ranks are taken to be placed node by node."""
    if v.get("OMPI_COMM_WORLD_RANK") is None:
        return None
    cure = "start the ranks with Open MPI's mpirun, which sets every OMPI_COMM_WORLD_* variable"
    world_size = v.size("OMPI_COMM_WORLD_SIZE", cure)
    local_size = v.size("OMPI_COMM_WORLD_LOCAL_SIZE", cure)
    rank = v.rank("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", world_size, cure)
    local_rank = v.rank("OMPI_COMM_WORLD_LOCAL_RANK", "ranks on this node", local_size, cure)
    num_nodes, node_rank = _equal_nodes(rank, local_rank, world_size, local_size)
    pass_on = "set it to the first host (a free port) and pass it on, as mpirun -x MASTER_ADDR does"
    job = v.get("PMIX_NAMESPACE")  # one per mpirun, the same on every rank
    return Environment(
        "openmpi",
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr="127.0.0.1"
        if num_nodes == 1 and not v.get("MASTER_ADDR")
        else v.text("MASTER_ADDR", pass_on),
        master_port=port_from_id(job) if job and not v.get("MASTER_PORT") else v.port(pass_on),
    )


def plain(v: _Variables) -> Environment:
    """One process alone; what a launcher left half done is an error."""
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        if v.get(name):
            raise LauncherError(f"{name} is set but RANK is not; set RANK too, or unset {name}")
    if v.local_rank is not None:
        raise LauncherError("--local-rank is given but RANK is not set; set RANK too")
    return Environment(
        "plain",
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        master_addr="127.0.0.1",
        master_port=port_from_id(v.run_id()),
    )


# The first that knows its own variables decides: an agent under srun or mpirun sets RANK itself.
LAUNCHERS = (torchrun, slurm, openmpi, plain)


def detect(
    environ: Mapping[str, str] | None = None, *, local_rank: int | None = None
) -> Environment:
    """Return this process's place in the run.

    Args:
        environ: variables to read instead of the process's own.
        local_rank: the --local-rank argument of torch.distributed.launch.

    Raises:
        LauncherError: a variable is missing, out of range, or contradicts another.
        HostlistError: the step's node list cannot be read.
    """
    v = _Variables(os.environ if environ is None else environ, local_rank)
    for launcher in LAUNCHERS:
        place = launcher(v)
        if place is not None:
            return replace(
                place,
                run_id=v.run_id(),
                log_dir=Path(v.get("LOG_DIR") or "logs"),
                restart_count=int(v.get("TORCHELASTIC_RESTART_COUNT") or 0),
                agent_store=v.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                heartbeat_file=v.get("HEARTBEAT_FILE"),
                backend=v.get("BACKEND"),
            )
    raise AssertionError("plain takes every process")


def port_from_id(run_id: str) -> int:
    """Return a port of [10000, 32768), the same for one id on every machine."""
    return PORTS[zlib.crc32(run_id.encode()) % len(PORTS)]


def new_run_id() -> str:
    """Return YYYYMMDD-HHMMSS-<4 hex digits> from the time and the process id."""
    mixed = zlib.crc32(f"{time.time_ns()} {os.getpid()}".encode())
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{mixed & 0xFFFF:04x}"


def main(arguments: list[str]) -> int:
    match arguments:
        case ["port", run_id]:
            print(port_from_id(run_id))
        case ["new-id"]:
            print(new_run_id())
        case _:
            print("usage: python -m distributed.environment port ID | new-id", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
