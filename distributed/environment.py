"""Detect which launcher started this process, and which rank this process is (no torch)."""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from . import hostlist
from .job import is_task, job_id, job_run_id

_RUN_ID = re.compile(r"[A-Za-z0-9_][\w\]\[.-]{0,127}", re.ASCII)
_TAKEN_RUN_ID = re.compile(r"latest|tensorboard|distributed_training|node_[0-9]+\.log")
_MOST_TASKS = 10**6
DEFAULT_LOG_DIR = "logs"
BACKENDS = "nccl", "gloo"  # any other value of BACKEND may be meant for another program


def printable(text: str, longest: int = 600) -> str:
    """Return text as one line with control characters escaped; a long one is cut in the middle."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    half = longest // 2
    return shown if len(shown) <= longest else f"{shown[:half]} ... {shown[-half:]}"


class LauncherError(ValueError):
    """The launcher's variables are invalid or contradict each other: `cause; fix [fault]`."""

    def __init__(self, text: str, fault: str = "wrong-world") -> None:
        super().__init__(f"{printable(text)} [{fault}]")
        self.fault = fault


@dataclass(frozen=True)
class Environment:
    """One process's place in the run. Ranks and sizes count processes; node ranks count hosts."""

    launcher: str  # "torchrun", "launch", "slurm", "plain" or an MPI: "openmpi", "mpich", ...
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    # The same under every launcher; detect() adds them.
    run_id: str = ""
    is_named: bool = False  # the run id was given, not made up by this process
    log_dir: Path = Path(DEFAULT_LOG_DIR)
    restart_count: int = 0
    agent_store: bool = False  # the node agent serves the store on the master's port
    heartbeat_file: str = ""  # empty without a node agent
    backend: str | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is global rank 0, which logs and saves for all ranks."""
        return self.rank == 0


class Variables(dict[str, str]):
    """The variables of one process, "" if not set. The methods raise LauncherError with the fix."""

    cure = ""  # for a variable that is missing; each reader of a launcher's variables sets its own

    def __missing__(self, name: str) -> str:
        return ""

    def text(self, name: str) -> str:
        """Return a variable that must be set."""
        if not self[name]:
            raise LauncherError(f"{name} is not set; {self.cure}")
        return self[name]

    def number(
        self, name: str, low: int = 1, high: int = 2**31, why: str = "", default: str = ""
    ) -> int:
        """Return an integer in low..high, `default` if not set; `why` explains the bounds."""
        value = self[name] or default or self.text(name)
        if value.isascii() and value.isdigit() and low <= int(value) <= high:
            return int(value)
        raise LauncherError(
            f"{name}={value} is not a number from {low} to {high}{why}; {self.cure or 'unset it'}"
        )

    def rank(self, name: str, size: int, size_name: str) -> int:
        return self.number(name, 0, size - 1, f" ({size_name}={size})")

    def master(self, address: str = "", port_id: str = "") -> tuple[str, int]:
        """Return MASTER_ADDR, by default `address`, and MASTER_PORT, by default from `port_id`."""
        address = self["MASTER_ADDR"] or address or self.text("MASTER_ADDR")
        if port_id and not self["MASTER_PORT"]:
            return address, port_from_id(port_id)
        return address, self.number("MASTER_PORT", 1, 2**16 - 1)


def torchrun(v: Variables) -> Environment:
    """Read the variables set by torchrun, our node agent, torch.distributed.launch or by hand."""
    v.cure = "start the ranks with torchrun, or set every variable that it sets"
    local_name = "--local-rank" if v["--local-rank"] else "LOCAL_RANK"
    if v["LOCAL_RANK"] not in ("", v[local_name]):
        raise LauncherError(
            f"LOCAL_RANK={v['LOCAL_RANK']} but --local-rank is {v[local_name]}; give only one"
        )

    # If LOCAL_WORLD_SIZE is not set, as in a start by hand, all ranks must be on this machine.
    size_name = "LOCAL_WORLD_SIZE" if v["LOCAL_WORLD_SIZE"] else "WORLD_SIZE"
    ranks = _ranks_of_equal_nodes(v, "RANK", "WORLD_SIZE", local_name, size_name)
    env = Environment("launch" if v["--local-rank"] else "torchrun", *ranks, *v.master())
    if size_name == "WORLD_SIZE" and env.rank != env.local_rank:
        cause = f"RANK={env.rank} differs from LOCAL_RANK={env.local_rank}: there are several nodes"
        raise LauncherError(f"{cause}; set LOCAL_WORLD_SIZE, the number of ranks on this node")

    if not v["GROUP_WORLD_SIZE"]:  # torchrun's number of nodes, which may be unequal
        return env
    num_nodes = v.number("GROUP_WORLD_SIZE")
    node_rank = v.rank("GROUP_RANK", num_nodes, "GROUP_WORLD_SIZE")
    return replace(env, node_rank=node_rank, num_nodes=num_nodes)


def mpi(launcher: str, names: tuple[str, ...], command: str, v: Variables) -> Environment:
    """Read the variables set by an MPI's mpiexec. Assumes that ranks are placed node by node."""
    v.cure = f"start the ranks with {command}, which sets it"
    ranks = _ranks_of_equal_nodes(v, *names)
    is_alone = ranks[-1] == 1  # one node
    v.cure = "use mpirun -x or mpiexec -genv (MASTER_ADDR: first host, MASTER_PORT: free port)"
    # An id that all ranks of this start have in common: each rank derives the port from it.
    port_id = v["PMIX_NAMESPACE"] or v["I_MPI_HYDRA_UUID"] or v["PALS_APID"] or job_id(v)
    port_id = port_id or (_starter() if is_alone else "")
    return Environment(launcher, *ranks, *v.master("127.0.0.1" if is_alone else "", port_id))


def _starter() -> str:
    """Name the parent of this rank's process group leader; MPICH's ranks on a node share it.

    Returns a text such as "process 12", or "" if /proc does not show it.
    """
    try:
        stat = Path(f"/proc/{os.getpgrp()}/stat").read_text(errors="replace")
    except OSError:
        return ""
    # After the program's name come its state and its parent: proc(5).
    return f"process {stat.rpartition(')')[2].split()[1]}"


def no_local_rank(v: Variables) -> Environment:
    """Return a single process's environment; raises LauncherError unless the size is set to 1."""
    mark = next(mark for mark in _SIZES if v[mark])
    if v[_SIZES[mark]] == "1":
        return plain(v)
    raise LauncherError(
        f"{mark}={v[mark]}, but no variable gives this process's local rank; start the ranks with "
        f"torchrun or scripts/launch.sh; for a single process, unset {mark}"
    )


def _ranks_of_equal_nodes(
    v: Variables, rank_name: str, size_name: str, local_rank_name: str, local_size_name: str
) -> tuple[int, int, int, int, int, int]:
    """Return Environment's six numbers, assuming that every node runs as many ranks as this one."""
    world_size = v.number(size_name)
    local_size = v.number(local_size_name, 1, world_size, f" ({size_name}={world_size})")
    rank = v.rank(rank_name, world_size, size_name)
    local_rank = v.rank(local_rank_name, local_size, local_size_name)
    # Not computed from the local rank: Open MPI 5 numbers the ranks of a node in another order.
    node_rank = rank // local_size
    num_nodes = -(-world_size // local_size)
    return rank, local_rank, world_size, local_size, node_rank, num_nodes


def slurm(v: Variables) -> Environment:
    """Read the variables of a SLURM task's step: those of the job may list more nodes."""
    if not is_task(v):  # a command that was typed in a task's shell
        return plain(v)

    v.cure = "start the ranks with srun, which sets it"
    world_size = v.number("SLURM_STEP_NUM_TASKS")
    # Many batch scripts export WORLD_SIZE, and the training script may read it.
    if v["WORLD_SIZE"] not in ("", str(world_size)):
        cause = f"WORLD_SIZE={v['WORLD_SIZE']} but SLURM_STEP_NUM_TASKS={world_size}"
        raise LauncherError(f"{cause}; unset WORLD_SIZE, or ask srun for that many tasks")

    rank = v.rank("SLURM_PROCID", world_size, "SLURM_STEP_NUM_TASKS")
    first_host, tasks = _read_hosts_and_tasks(v)
    why = f" (SLURM_STEP_TASKS_PER_NODE={v['SLURM_STEP_TASKS_PER_NODE']})"
    num_nodes = v.number("SLURM_STEP_NUM_NODES", len(tasks), len(tasks), why)
    node_rank = v.rank("SLURM_NODEID", num_nodes, "SLURM_STEP_NUM_NODES")
    local_rank = v.rank("SLURM_LOCALID", tasks[node_rank], "tasks on this node")

    if v["SLURM_DISTRIBUTION"].startswith("arbitrary") and not v["MASTER_ADDR"]:
        cause = "srun --distribution=arbitrary can put rank 0 on any node"
        raise LauncherError(f"{cause}; omit it, or set MASTER_ADDR to that node")
    step = f"{job_id(v)}.{v['SLURM_STEP_ID']}"
    ranks = rank, local_rank, world_size, tasks[node_rank], node_rank, num_nodes
    return Environment("slurm", *ranks, *v.master(first_host, step))


def _read_hosts_and_tasks(v: Variables) -> tuple[str, list[int]]:
    """Return the step's first host, and the number of tasks on each host.

    SLURM sorts hosts by name, but starts the tasks of a heterogeneous job group by group.
    """
    hosts = v.text("SLURM_STEP_NODELIST")
    tasks = tasks_per_node(v.text("SLURM_STEP_TASKS_PER_NODE"))
    groups = [
        v[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"]
        or v[f"SLURM_JOB_NODELIST_PACK_GROUP_{group}"]  # an srun outside a job sets only this
        for group in range(v.number("SLURM_HET_SIZE", 0, 1000, default="0"))
    ]
    if not any(groups):
        return hostlist.first(hosts), tasks

    tasks_of = dict(zip(hostlist.expand(hosts), tasks, strict=False))
    order = [host for host in hostlist.expand(",".join(groups)) if host in tasks_of]
    if {*order} != tasks_of.keys():
        cause = f"SLURM_STEP_NODELIST={hosts!r:.80} has hosts that are in none of the job's groups"
        raise LauncherError(f"{cause}; {v.cure}")
    return order[0], [tasks_of[host] for host in order]


def tasks_per_node(text: str, name: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """Expand SLURM's short form: `2(x2),1` gives [2, 2, 1]. Raises LauncherError if invalid."""
    counts = list[int]()
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item)
        if match is None or int(match[2] or 1) + len(counts) > _MOST_TASKS:
            raise LauncherError(f"{name}={text} cannot be read; use srun")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def plain(v: Variables) -> Environment:
    """Return a single process's environment; raises LauncherError if there should be others."""
    nodes = v.number("SLURM_JOB_NUM_NODES", default="1")
    job_tasks = v.number("SLURM_NTASKS", default=str(nodes))  # by default, one per node
    started = v.number("SLURM_STEP_NUM_TASKS", default="1")  # can be more in a salloc shell
    if v["SLURM_JOB_ID"] and started < job_tasks:
        cause = f"job {job_id(v)} has {job_tasks} tasks, but srun did not start this process"
        raise LauncherError(f"{cause}; put srun before the command", fault="batch-step")
    for name in "WORLD_SIZE", "LOCAL_RANK", "--local-rank":
        if v[name]:
            raise LauncherError(f"{name} is set, but RANK is not set; set both, or neither")
    return Environment("plain", 0, 0, 1, 1, 0, 1, "127.0.0.1", port_from_id(_run_id(v)))


# The variables that each MPI sets: rank, size, local rank, local size.
# fmt: off
_OPENMPI = (
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MVAPICH2 = (
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
)
_MVAPICH3 = (
    "MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE",
    "MVP_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_SIZE",
)
# fmt: on
_HYDRA = "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"  # MPICH, Intel MPI
_CRAY = "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"
_PALS = "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"
_SIZES = {"PMI_RANK": "PMI_SIZE", "FLUX_TASK_RANK": "FLUX_JOB_SIZE", "PMIX_RANK": ""}

# The first variable that is set decides: an agent under srun or mpirun sets RANK, mpirun may use
# srun, and srun can set PMI's variables.
LAUNCHERS: dict[str, Callable[[Variables], Environment]] = {
    "RANK": torchrun,
    "OMPI_COMM_WORLD_RANK": partial(mpi, "openmpi", _OPENMPI, "Open MPI's mpirun"),
    "MV2_COMM_WORLD_RANK": partial(mpi, "mvapich", _MVAPICH2, "MVAPICH's mpirun"),
    "MVP_COMM_WORLD_RANK": partial(mpi, "mvapich", _MVAPICH3, "MVAPICH's mpirun"),
    "MPI_LOCALRANKID": partial(mpi, "mpich", _HYDRA, "mpiexec of MPICH or Intel MPI"),
    "SLURM_STEP_ID": slurm,
    "PMI_LOCAL_RANK": partial(mpi, "pals", _CRAY, "Cray's mpiexec"),
    "PALS_RANKID": partial(mpi, "pals", _PALS, "Cray's mpiexec"),
    **dict.fromkeys(_SIZES, no_local_rank),
}


def detect(
    environ: Mapping[str, str] | None = None, *, local_rank: int | None = None
) -> Environment:
    """Return the environment of the process with these variables, by default this process's.

    `local_rank` is the --local-rank argument of torch.distributed.launch. Raises LauncherError or
    HostlistError if a variable is missing or wrong, or contradicts another.
    """
    v = Variables(os.environ if environ is None else environ)
    if local_rank is not None:
        v["--local-rank"] = str(local_rank)
    read = next((reader for name, reader in LAUNCHERS.items() if v[name]), plain)
    backend = v["BACKEND"].lower()
    restart_counts = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"  # an agent's, a job's

    return replace(
        read(v),
        run_id=_run_id(v),
        is_named=bool(v["RUN_ID"]),
        log_dir=Path(v["LOG_DIR"] or DEFAULT_LOG_DIR),
        restart_count=sum(v.number(name, 0, default="0") for name in restart_counts),
        agent_store=v["TORCHELASTIC_USE_AGENT_STORE"] == "True",
        heartbeat_file=v["HEARTBEAT_FILE"],
        backend=backend if backend in BACKENDS else None,
    )


def _run_id(v: Variables) -> str:
    given = (v["RUN_ID"], v["TORCHELASTIC_RUN_ID"], job_run_id(v))
    known = [one for one in given if one not in ("", "none")]  # "none": torchrun's default
    return check_run_id(known[0]) if known else new_run_id()


def check_run_id(run_id: str) -> str:
    """Return a run id that can name a folder and is not reserved; otherwise raise LauncherError."""
    if not _RUN_ID.fullmatch(run_id):
        rule = "use at most 128 letters, digits, _, . and -, and do not begin with . or -"
        raise LauncherError(f"RUN_ID is {run_id!r:.150}; {rule}", fault="config-invalid")
    if _TAKEN_RUN_ID.fullmatch(run_id):
        text = f"RUN_ID is {run_id!r}, a name that is reserved in the log folder; choose another"
        raise LauncherError(text, fault="config-invalid")
    return run_id


def port_from_id(run_id: str) -> int:
    """Return a port in 10000..32767, below Linux's ephemeral ports, that depends only on the id."""
    return 10_000 + zlib.crc32(os.fsencode(run_id)) % 22_768


@cache
def new_run_id() -> str:
    """Return YYYYMMDD-HHMMSS-<4 random hex digits>; each later call returns the same id."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def check_numbers(actual: str, *numbers: tuple[str, int | None, int]) -> None:
    """Raise LauncherError if a number is given and differs from the actual one.

    Each of `numbers` is a name, what the caller has given (None: nothing), and the actual number,
    which the message introduces with `actual`, such as "this run's is".
    """
    for name, given, own in numbers:
        if given not in (None, own):
            raise LauncherError(f"{name} is {given} but {actual} {own}; make them agree")
