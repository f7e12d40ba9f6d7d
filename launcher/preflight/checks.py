"""The checks of one machine (no torch). Each yields faults unless its docstring is true."""

import contextlib
import errno
import functools
import os
import resource
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from distributed.network import interface_to
from launcher.master_port import find_holder, hosts_line, is_here, is_loopback, is_loopback_up
from launcher.preflight import cgroup, infiniband, must_match
from launcher.preflight.gpus import DEVICES, Gpu, find_slow, newest_cuda
from launcher.text import Environ, count, torch_cure, unwritable_fault
from launcher.wire.messages import Fault, Faults, Request

OLDEST_TORCH = (2, 4)
FIRST_DRIVER = {11: 450, 12: 525, 13: 580}  # by CUDA version: CUDA Compatibility, table 2 (NVIDIA)
AGENT_FILES = 27  # open files of a node agent, in addition to its connections
RANK_FILES = 6  # the same, for each of its ranks
LEAST_FILES = 1024  # open files of one process; Linux's own default
LEAST_SHM = 512 << 20  # bytes; Docker's default of 64 MiB is too small for data workers
LEAST_DISK = 2 << 30  # bytes free where checkpoints go
LEAST_MEMLOCK = 64 << 10  # bytes; Linux's own default before 5.16
LEAST_MEMLOCK_INFINIBAND = 1 << 30  # bytes; every buffer on the wire is locked memory

warning = functools.partial(Fault, warns=True)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is asked about this node, and what is known of it."""

    request: Request
    nproc: int  # ranks; 0 means that their number is not known
    port: int  # the master's
    port_error: int  # errno if the port cannot be opened, otherwise 0
    gpus: tuple[Gpu, ...]
    gpu_error: str  # why the GPUs could not be examined
    environ: Environ
    cpus: int  # that this process may use
    ports: tuple[infiniband.Port, ...]
    can_open_ports: bool  # whether this process can open InfiniBand ports

    @property
    def script(self) -> Path | None:
        """The training script, if it is a file."""
        first = self.request.words[0]
        return None if first in ("-m", "--no-python") else self.request.directory / first

    @property
    def may_use_infiniband(self) -> bool:
        """Whether NCCL uses InfiniBand or RoCE between nodes if there is a port for it."""
        backend = self.request.backend
        has_nccl = backend == "nccl" or (backend == "auto" and len(self.gpus) > 0)
        return self.request.num_nodes > 1 and has_nccl and infiniband.is_wanted(self.environ)


def check_program(machine: Machine) -> Faults:
    """This Python has a torch that can be used, and the training script exists."""
    torch = must_match.versions()["torch"]
    if not torch:
        yield Fault("env-missing", f"{sys.executable} has no torch", torch_cure())
    elif tuple(map(int, torch.split(".")[:2])) < OLDEST_TORCH:
        cause = f"{sys.executable} has torch {torch}, too old for the launchers"
        yield Fault("env-missing", cause, "install {}.{} or newer".format(*OLDEST_TORCH))
    elif missing := must_match.find_missing_of_torch():
        cure = "set PYTHON to another Python, or repair its torch"
        yield Fault("env-missing", f"{sys.executable} cannot import torch: {missing}", cure)
    elif (path := machine.script) and not (path.is_file() or (path / "__main__.py").is_file()):
        cause = f"there is no script {str(path)!r}"
        if path.is_dir():
            cause = f"{str(path)!r} is a folder without __main__.py"
        yield Fault("env-missing", cause, "correct its path; for a module, give -m and its name")


def check_gpus(machine: Machine) -> Faults:
    """Each process has its own healthy, idle GPU; without visible GPUs, all run on the CPU."""
    cure = "have the GPU reset or replaced, or exclude it with CUDA_VISIBLE_DEVICES"
    has_gpu = machine.gpus or any(map(os.path.exists, DEVICES))
    backend = machine.request.backend
    if machine.gpu_error:
        yield Fault("gpu-unhealthy", machine.gpu_error, cure)
    elif machine.nproc == 0:
        yield Fault("too-few-gpus", "there is no visible GPU", "give a number of processes")
    elif backend == "nccl" and not has_gpu:
        cause = "backend nccl needs a GPU, but there is none"
        yield Fault("too-few-gpus", cause, "set BACKEND=gloo")

    different = {gpu.uuid for gpu in machine.gpus}  # CUDA_VISIBLE_DEVICES may name one twice
    if 0 < len(different) < machine.nproc and backend != "gloo":
        cause = f"{machine.nproc} processes, but only {count(len(different), 'visible GPU')}"
        is_shared = machine.nproc <= len(machine.gpus)  # as the variable asks for
        yield Fault("too-few-gpus", cause, "start fewer; see CUDA_VISIBLE_DEVICES", warns=is_shared)

    for gpu in machine.gpus:
        if gpu.memory_errors:
            cause = f"GPU {gpu.index} has {count(gpu.memory_errors, 'uncorrected memory error')}"
            yield Fault("gpu-unhealthy", cause, cure)
        if gpu.processes or gpu.is_taken:
            used = f"{gpu.used_mib} of {gpu.total_mib} MiB of its memory"
            cause = f"GPU {gpu.index} has {used} in use, by an unknown process"
            if gpu.processes:
                cause = f"GPU {gpu.index} is in use by {', '.join(gpu.processes)}"
            yield warning("gpu-unhealthy", cause, "wait until it is free, or choose another GPU")


def check_gpu_speed(machine: Machine) -> Faults:
    """No GPU is slower than it should be; every step would wait for a slow one."""
    for cause in find_slow(machine.gpus):
        cure = "have it inspected, or exclude it with CUDA_VISIBLE_DEVICES"
        yield warning("gpu-slow", cause, cure)


def check_build(machine: Machine) -> Faults:
    """The GPUs can be used: torch is built for them, and their driver is new enough."""
    torch = must_match.read_torch()
    if torch.get("hip"):
        yield from _check_rocm_variables(machine.environ)
        return
    if not machine.gpus or machine.request.backend == "gloo":
        return

    cuda = torch.get("cuda")
    driver = machine.gpus[0].driver
    if torch and not cuda:
        cause = f"{count(len(machine.gpus), 'GPU')} here, but torch {torch['__version__']} is built"
        cure = "install torch with CUDA, or set BACKEND=gloo to train on the CPU"
        yield Fault("torch-without-gpu", f"{cause} without CUDA", cure)
    elif cuda and driver:
        major = int(cuda.partition(".")[0])
        least = FIRST_DRIVER.get(major, 0)
        if int(driver.partition(".")[0]) < least and newest_cuda() < 1000 * major:
            cause = f"GPU driver {driver} is too old for torch's CUDA {cuda}"
            cure = f"have {least} or newer installed, or install torch for an older CUDA"
            yield Fault("torch-without-gpu", cause, f"{cure}, or set BACKEND=gloo")


def _check_rocm_variables(environ: Environ) -> Faults:
    """HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES choose the same GPUs, of those ROCm shows."""
    shown = environ.get("ROCR_VISIBLE_DEVICES")
    by_hip = environ.get("HIP_VISIBLE_DEVICES")
    by_cuda = environ.get("CUDA_VISIBLE_DEVICES")
    if None not in (by_hip, by_cuda) and by_hip != by_cuda:
        cause = f"HIP_VISIBLE_DEVICES={by_hip} but CUDA_VISIBLE_DEVICES={by_cuda}"
        yield Fault("visible-devices", cause, "unset one of them")

    name = "CUDA_VISIBLE_DEVICES" if by_hip is None else "HIP_VISIBLE_DEVICES"
    wanted = environ.get(name)
    numbers = [int(word) for word in (wanted or "").split(",") if word.isdecimal()]
    if shown is None or not numbers:
        return

    left = len(shown.split(",")) if shown else 0
    if max(numbers) >= left:
        cause = f"{name}={wanted} asks for GPU {max(numbers)}, but ROCR_VISIBLE_DEVICES={shown}"
        cause += f" leaves only {count(left, 'GPU')}, numbered from 0"
        yield Fault("visible-devices", cause, f"unset {name}")


def check_cpus(machine: Machine) -> Faults:
    """Each rank, and each of its data workers, has its own CPU."""
    workers = machine.request.num_workers  # of each rank
    wanted = machine.nproc * (1 + workers)
    if 0 < machine.cpus < wanted:
        cause = f"{count(machine.cpus, 'CPU')} for {count(machine.nproc, 'rank')}"
        if workers:
            cause += f", each with {count(workers, 'data worker')}"
        if machine.cpus < len(os.sched_getaffinity(0)):
            cause += " (by a quota)"
        cure = f"request {wanted} CPUs per node (SLURM: --cpus-per-gpu, per GPU), or start fewer"
        yield warning("few-cpus", cause, cure)


def check_master(machine: Machine) -> Faults:
    """The master's name leads to node rank 0, also from other nodes, and its port is free here."""
    request = machine.request
    name = request.master_addr
    addresses = []
    try:
        addresses = [str(address[0]) for *_, address in socket.getaddrinfo(name, None)]
    except OSError:
        cause = f"the master's name {name!r} is unknown"
        cure = "correct it, or give its address"
        is_awaited = request.num_nodes > 1 and request.meeting_size == 0  # may not exist yet
        if is_awaited:
            cure = f"the nodes wait until it resolves; if it is wrong, {cure}"
        yield Fault("name-unresolved", cause, cure, warns=is_awaited)

    loopback = [address for address in addresses if is_loopback(address)]
    if request.num_nodes > 1 and loopback:
        means = "is a loopback address" if name == loopback[0] else f"resolves to {loopback[0]}"
        cause = f"the master {name} {means}, which no other machine can reach"
        literal = name in ("localhost", "127.0.0.1", "::1")  # maybe all nodes are this machine
        if not literal and (line := hosts_line(name)):
            cause += f" (/etc/hosts line {line})"
        cure = "give the master's address on the network the nodes share"
        yield Fault("loopback-address", cause, cure, warns=literal)

    is_master = request.num_nodes > 1 and request.node_rank == 0
    if is_master and addresses and not is_here(addresses[0]):
        cause = f"the master's address {addresses[0]} does not belong to this node (node rank 0)"
        cure = "set MASTER_ADDR to an address of this node; behind NAT or a service, ignore this"
        yield warning("no-such-interface", cause, cure)
    yield from _check_port(machine)


def _check_port(machine: Machine) -> Faults:
    """This node can listen on the master's port."""
    if machine.port_error == errno.EADDRINUSE:
        holder = find_holder(machine.port)
        run_id = machine.request.run_id
        if f" --rdzv-id {run_id} " in holder:
            cause = f"run {run_id} is live: its node agent is running here"
            yield Fault("run-is-live", cause, "wait until it ends, or choose another RUN_ID")
        else:
            cause = f"port {machine.port} is taken{holder[:120]}"
            yield Fault("port-in-use", cause, "end that process, or set MASTER_PORT to a free port")
    elif machine.port_error:
        cause = f"port {machine.port} cannot be opened ({os.strerror(machine.port_error)})"
        yield Fault("port-in-use", cause, "choose one above 1023 with MASTER_PORT")


def check_interfaces(machine: Machine) -> Faults:
    """Loopback is up; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name interfaces of this machine."""
    if not is_loopback_up():
        cause = "the loopback interface is down, so no rank here can reach another"
        yield Fault("no-such-interface", cause, "run ip link set lo up")

    names = [name for _, name in socket.if_nameindex()]
    leads = interface_to(machine.request.master_addr)
    cure = f"unset it, or name one of {', '.join(names)}"
    if leads not in (None, "lo"):
        cure = f"unset it, or name {leads}, which leads to the master"

    gloo = machine.environ.get("GLOO_SOCKET_IFNAME", "")
    if missing := [name for name in gloo.split(",") if gloo and name not in names]:
        cause = f"GLOO_SOCKET_IFNAME={gloo}: this machine has no interface {', '.join(missing)}"
        yield Fault("no-such-interface", cause, f"{cure} (only NCCL supports ^ to exclude)")

    nccl = machine.environ.get("NCCL_SOCKET_IFNAME", "")
    if not any(infiniband.is_chosen(name, nccl) for name in names):
        named = infiniband.spell("NCCL_SOCKET_IFNAME", machine.environ)
        yield Fault("no-such-interface", f"{named} excludes all interfaces of this machine", cure)


def check_infiniband(machine: Machine) -> Faults:
    """The ports that NCCL would use between nodes are active, and can be used from here."""
    if not machine.may_use_infiniband:
        return

    ports = infiniband.ports_of_nccl(machine.ports, machine.environ)
    active = [port.name for port in ports if port.is_active]
    down = [f"{port.name} is {port.state} ({port.physical})" for port in ports if port.is_down]

    if down:
        others = f"{count(len(active), 'other')} active" if active else "none active"
        cure = "check its cable and switch, or name the ports to use in NCCL_IB_HCA"
        yield warning("infiniband-down", f"port {', '.join(down)}, {others}", cure)

    all_active = [port.name for port in machine.ports if port.is_active]
    if all_active and not ports:
        cause = infiniband.spell("NCCL_IB_HCA", machine.environ) + " does not match any active port"
        yield warning("nccl-on-sockets", cause, f"unset it, or name one of {', '.join(all_active)}")

    if active and not machine.can_open_ports:
        cause = f"port {active[0]} is active, but {infiniband.DEVICES} cannot be opened here"
        cure = "give the container access to it, or set NCCL_PROFILE=ethernet"
        yield warning("nccl-on-sockets", cause, cure)


def check_limits(machine: Machine) -> Faults:
    """The limits are high enough for data workers and NCCL, and for InfiniBand's locked buffers."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1 means no limit
    # Node rank 0's agent has a connection to each node, and one of each rank to its store.
    request = machine.request
    needed = (1 + machine.nproc) * request.num_nodes + AGENT_FILES + RANK_FILES * machine.nproc
    if request.node_rank == 0 and 0 <= most < needed:
        cause = f"the hard limit on open files is {most}, and this run's agent needs {needed}"
        yield Fault("low-nofile", cause, "raise it (limits.conf; under SLURM, slurmd's limit)")
    if 0 <= files < LEAST_FILES:
        cause = f"the limit on open files is {files} (data workers need {LEAST_FILES})"
        yield warning("low-nofile", cause, "run ulimit -n 65536 before the launch")
    yield from cgroup.check_processes(machine.nproc, request.num_workers)

    shm, _, free = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else (0, 0, 0)
    if free < LEAST_SHM:
        cause = f"/dev/shm has only {free >> 20} MiB free, of {shm >> 20} MiB"
        yield warning("small-shm", cause, "empty it, or give Docker --ipc=host or --shm-size=8g")

    ports = infiniband.ports_of_nccl(machine.ports, machine.environ)
    is_active = any(port.is_active for port in ports)
    is_used = machine.may_use_infiniband and machine.can_open_ports and is_active
    least = LEAST_MEMLOCK_INFINIBAND if is_used else LEAST_MEMLOCK
    locked, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if 0 <= locked < least:
        cause = f"the limit on locked memory is {locked >> 10} KiB"
        cure = f"run ulimit -l {'unlimited' if most < 0 else most >> 10}"
        if 0 <= most < least:
            cure = "ask the administrator to raise it (limits.conf; under SLURM, slurmd's limit)"
        yield Fault("low-memlock", cause, cure, warns=not is_used)


def check_folders(machine: Machine) -> Faults:
    """There is space for logs and checkpoints, and a real write succeeds. Makes purged folders."""
    # Other nodes save only sharded checkpoints, in a folder that they share with node rank 0.
    request = machine.request
    saved = request.checkpoint_dir if request.node_rank == 0 else None
    for directory in (request.directory / folder for folder in (request.log_dir, saved) if folder):
        if directory.is_symlink():  # perhaps to a folder that was purged
            with contextlib.suppress(OSError):
                os.makedirs(os.path.realpath(directory), exist_ok=True)

        parent = nearest_existing(directory)
        try:
            with tempfile.TemporaryFile(dir=parent) as probe:
                probe.write(b"\0")
        except OSError as error:
            cause = f"cannot write under {str(directory)!r} ({error.strerror})"
            cure = "choose another folder (LOG_DIR, checkpoint.dir)"
            yield Fault(unwritable_fault(error), cause, cure)
            continue
        free = shutil.disk_usage(parent).free
        if free < LEAST_DISK:
            cause = f"{free >> 20} MiB free under {str(directory)!r}"
            yield warning("disk-low", cause, "free some space, or choose another folder")


CHECKS = {  # each with the number of things that it checks
    check_program: 1,
    check_gpus: 3,
    check_gpu_speed: 4,
    check_build: 1,
    check_cpus: 1,
    check_master: 3,
    check_interfaces: 3,
    check_infiniband: 2,
    check_limits: 3,
    check_folders: 2,
}


def nearest_existing(directory: Path) -> Path:
    """Return the directory, or its nearest parent that exists."""
    return next(path for path in (directory, *directory.parents) if os.path.exists(path))
