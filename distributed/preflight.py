"""Is this machine fit for the run? Small named checks, run on each node before anything starts.

    python -m distributed.preflight --script train.py --run-id ID     check this node
    python -m distributed.preflight wait ADDRESS PORT SECONDS         wait for the master to listen

Prints what the plan needs to know of the node as name=value lines on stdout, and each fault as one
line on stderr. Exit code 3 when one refuses the start. No torch import, so it is instant.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.environment import port_from_id
from distributed.gpus import Gpu, GpuError, visible_gpus

REFUSED = 3
GIB = 1 << 30
LEAST_FILES = 1024  # open files of one process; Linux's own default
LEAST_SHM = 512 << 20  # bytes; Docker's default of 64 MiB is too small for data workers
LEAST_DISK = 2 * GIB  # bytes free where checkpoints go
LEAST_MEMLOCK = 64 << 10  # bytes; Linux's own default before 5.16
LEAST_MEMLOCK_INFINIBAND = GIB  # bytes; every buffer on the wire is locked memory
LITERAL_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Fault:
    """What is wrong under its name in TROUBLESHOOTING.md, and the cure. Some only warn."""

    name: str
    cause: str
    cure: str
    warns: bool = False


@dataclass(frozen=True)
class Node:
    """This node's part in the plan, and what was found out about the node."""

    nnodes: int
    node_rank: int
    nproc: int
    master_addr: str
    port: int
    script: Path | None
    directories: tuple[Path, ...]  # logs and checkpoints
    gpus: tuple[Gpu, ...]
    gpu_error: str  # why they could not be looked at
    environ: Mapping[str, str]

    @property
    def is_master(self) -> bool:
        """Whether the ranks meet on this node."""
        return self.node_rank == 0


def check_environment(node: Node) -> Fault | None:
    """env-missing: this Python has torch, and the training script is here."""
    if importlib.util.find_spec("torch") is None:
        cure = "run make setup, or set VENV, CONDA_ENV or PYTHON"
        return Fault("env-missing", f"{sys.executable} has no torch", cure)
    if node.script and not node.script.is_file():
        return Fault("env-missing", f"there is no script {str(node.script)!r}", "correct its path")
    return None


def check_gpu_count(node: Node) -> Fault | None:
    """too-few-gpus: one process per visible GPU at most; without GPUs all run on the CPU."""
    if not 0 < len(node.gpus) < node.nproc:
        return None
    cause = f"{node.nproc} processes but {_count(len(node.gpus), 'visible GPU')}"
    return Fault("too-few-gpus", cause, "ask for fewer, or see CUDA_VISIBLE_DEVICES")


def check_gpu_health(node: Node) -> Fault | None:
    """gpu-unhealthy: the driver answers, and there are no uncorrected memory errors."""
    cure = "have the GPU reset or replaced, or leave it out with CUDA_VISIBLE_DEVICES"
    if node.gpu_error:
        return Fault("gpu-unhealthy", node.gpu_error, cure)
    for gpu in node.gpus:
        if gpu.memory_errors:
            cause = f"GPU {gpu.index} has {_count(gpu.memory_errors, 'uncorrected memory error')}"
            return Fault("gpu-unhealthy", cause, cure)
    return None


def check_gpu_idle(node: Node) -> Fault | None:
    """gpu-unhealthy: nobody else computes on these GPUs."""
    for gpu in node.gpus:
        if gpu.processes:
            cause = f"GPU {gpu.index} is in use by {', '.join(gpu.processes)}"
            return Fault("gpu-unhealthy", cause, "wait for it, or choose another GPU", warns=True)
    return None


def check_name(node: Node) -> Fault | None:
    """name-unresolved: the master's name means something here."""
    if _addresses(node.master_addr):
        return None
    cause = f"the master's name {node.master_addr!r} is unknown"
    return Fault("name-unresolved", cause, "correct it, or give its address")


def check_loopback(node: Node) -> Fault | None:
    """loopback-address: other nodes can reach the master under the name given."""
    loopback = [a for a in _addresses(node.master_addr) if a.startswith("127.") or a == "::1"]
    if node.nnodes == 1 or not loopback:
        return None
    literal = node.master_addr in LITERAL_LOOPBACK
    cause = f"the master {node.master_addr} is {loopback[0]}, which no other machine can reach"
    if not literal and (line := _hosts_line(node.master_addr)):
        cause += f" (/etc/hosts line {line})"
    cure = "give the master's address on the network the nodes share"
    return Fault("loopback-address", cause, cure, warns=literal)  # node ranks of one machine may


def check_port(node: Node) -> Fault | None:
    """port-in-use: the master can listen on the port."""
    if not node.is_master or (code := _bind_error(node.port)) == 0:
        return None
    if code != errno.EADDRINUSE:
        cause = f"port {node.port} cannot be opened ({os.strerror(code)})"
        return Fault("port-in-use", cause, "choose one above 1023 with MASTER_PORT")
    cause = f"port {node.port} is taken{_holder(node.port)}"
    return Fault("port-in-use", cause, "end that, or choose another with MASTER_PORT")


def check_gloo_interface(node: Node) -> Fault | None:
    """no-such-interface: GLOO_SOCKET_IFNAME lists interfaces by their whole names."""
    wanted = node.environ.get("GLOO_SOCKET_IFNAME", "")
    if wanted.startswith("^"):
        cause = f"GLOO_SOCKET_IFNAME={wanted} excludes, which gloo does not understand"
        return Fault("no-such-interface", cause, f"name one of {_interfaces()}")
    known = {name for _, name in socket.if_nameindex()}
    missing = [name for name in wanted.split(",") if name and name not in known]
    return _no_interface("GLOO_SOCKET_IFNAME", wanted) if missing else None


def check_nccl_interface(node: Node) -> Fault | None:
    """no-such-interface: NCCL_SOCKET_IFNAME (prefixes, or =exact, or ^excluded) leaves one."""
    wanted = node.environ.get("NCCL_SOCKET_IFNAME", "")
    if not wanted:
        return None
    marks = wanted[: len(wanted) - len(wanted.lstrip("^="))]
    words = tuple(wanted.lstrip("^=").split(","))
    names = [name for _, name in socket.if_nameindex()]
    if "=" in marks:
        named = [name for name in names if name in words]
    else:
        named = [name for name in names if name.startswith(words)]
    left = set(names) - set(named) if "^" in marks else named
    return None if left else _no_interface("NCCL_SOCKET_IFNAME", wanted)


def check_open_files(node: Node) -> Fault | None:
    """low-nofile: data workers pass tensors as file descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= LEAST_FILES:
        return None
    return Fault("low-nofile", f"at most {limit} open files", "ulimit -n 65536", warns=True)


def check_shared_memory(node: Node) -> Fault | None:
    """small-shm: data workers and NCCL share memory through /dev/shm."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        size = 0
    if size >= LEAST_SHM:
        return None
    cure = "in Docker: --ipc=host or --shm-size=8g"
    return Fault("small-shm", f"/dev/shm holds {size >> 20} MiB", cure, warns=True)


def check_locked_memory(node: Node) -> Fault | None:
    """low-memlock: InfiniBand locks its buffers in memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    infiniband = Path("/sys/class/infiniband").is_dir()
    least = LEAST_MEMLOCK_INFINIBAND if infiniband else LEAST_MEMLOCK
    if limit == resource.RLIM_INFINITY or limit >= least:
        return None
    cause = f"at most {limit >> 10} KiB of locked memory"
    return Fault("low-memlock", cause, "ulimit -l unlimited", warns=not infiniband)


def check_disk(node: Node) -> Fault | None:
    """disk-low: there is room for logs and checkpoints."""
    for directory in node.directories:
        free = shutil.disk_usage(_existing(directory)).free
        if free < LEAST_DISK:
            cause = f"{free >> 20} MiB free under {str(directory)!r}"
            return Fault("disk-low", cause, "make room, or choose another folder", warns=True)
    return None


def check_writable(node: Node) -> Fault | None:
    """dir-unwritable: a real write where logs and checkpoints go."""
    for directory in node.directories:
        try:
            _try_write(_existing(directory))
        except OSError as error:
            cause = f"cannot write under {str(directory)!r} ({error.strerror})"
            return Fault("dir-unwritable", cause, "choose another folder (LOG_DIR, checkpoint.dir)")
    return None


CHECKS: tuple[Callable[[Node], Fault | None], ...] = (
    check_environment,
    check_gpu_count,
    check_gpu_health,
    check_gpu_idle,
    check_name,
    check_loopback,
    check_port,
    check_gloo_interface,
    check_nccl_interface,
    check_open_files,
    check_shared_memory,
    check_locked_memory,
    check_disk,
    check_writable,
)


def choose_port(run_id: str, *, search: bool) -> int:
    """Return the port that belongs to the run id; with `search`, the next free one after it."""
    port = port_from_id(run_id)
    while search and _bind_error(port) == errno.EADDRINUSE:
        port += 1
    return port


def wait_for_master(address: str, port: int, limit_s: float) -> Fault | None:
    """Return once something listens there; after the limit, the fault that was in the way."""
    deadline = time.monotonic() + limit_s
    told = False
    while True:
        try:
            socket.create_connection((address, port), timeout=3).close()
            return None
        except OSError as error:
            last = error
        if time.monotonic() > deadline:
            return _unreached(address, port, limit_s, last)
        if not told:
            print(
                f"waiting for the master at {address}:{port}, {limit_s:.0f} s at most",
                file=sys.stderr,
            )
            told = True
        time.sleep(0.2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check this node, or wait for the master; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["wait"]:
        address, port, limit = arguments[1:]
        fault = wait_for_master(address, int(port), float(limit))
        return report([fault] if fault else [], strict=False)
    start = time.perf_counter()
    args = parse_arguments(arguments)
    node = examine(args, os.environ)
    checks = CHECKS if args.checks else ()
    faults = [fault for check in checks if (fault := check(node))]
    code = report(faults, strict=args.strict)
    print(f"gpus={len(node.gpus)}", f"nproc={node.nproc}", f"port={node.port}", sep="\n")
    print(f"checks={len(checks)}", f"warnings={len(faults)}", sep="\n")
    print(f"seconds={time.perf_counter() - start:.3f}")
    return code


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the launcher's words; it has checked them."""
    parser = argparse.ArgumentParser(prog="python -m distributed.preflight")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--nproc", default="auto", help="auto: one per GPU, else --cpu-nproc")
    parser.add_argument("--cpu-nproc", type=int, default=1)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument(
        "--port", default="auto", help="auto: the run id's, on one node the next free"
    )
    parser.add_argument("--run-id", default="")
    parser.add_argument("--script", default="")
    parser.add_argument("--directory", type=Path, default=Path(), help="where relative paths begin")
    parser.add_argument("--log-dir", default="logs")
    parser.add_argument("--checkpoint-dir", default="")
    parser.add_argument("--strict", action="store_true", help="a warning refuses too")
    parser.add_argument("--no-checks", dest="checks", action="store_false")
    return parser.parse_args(arguments)


def examine(args: argparse.Namespace, environ: Mapping[str, str]) -> Node:
    """Return the node as the plan and the machine together make it."""
    gpus: tuple[Gpu, ...] = ()
    gpu_error = ""
    try:
        gpus = visible_gpus(environ)
    except GpuError as error:
        gpu_error = str(error)
    port = choose_port(args.run_id, search=args.nnodes == 1) if args.port == "auto" else args.port
    return Node(
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        nproc=(len(gpus) or args.cpu_nproc) if args.nproc == "auto" else int(args.nproc),
        master_addr=args.master_addr,
        port=int(port),
        script=args.directory / args.script if args.script else None,
        directories=tuple(args.directory / d for d in (args.log_dir, args.checkpoint_dir) if d),
        gpus=gpus,
        gpu_error=gpu_error,
        environ=environ,
    )


def report(faults: Sequence[Fault], *, strict: bool) -> int:
    """Print one line per fault; returns 3 if one refuses the start, else 0."""
    program = os.environ.get("PROGRAM", "preflight")
    host = socket.gethostname().partition(".")[0]
    for fault in faults:
        kind = "warning: " if fault.warns and not strict else ""
        line = f"{program}: {kind}{fault.name} on {host}: {fault.cause}; {fault.cure}"
        print(line, file=sys.stderr)
    return REFUSED if any(strict or not fault.warns for fault in faults) else 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _addresses(name: str) -> list[str]:
    try:
        return [
            str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        ]
    except OSError:
        return []


def _hosts_line(name: str) -> int | None:
    """Return the number of the line of /etc/hosts that makes the name a loopback address."""
    with open("/etc/hosts") as hosts:
        for number, line in enumerate(hosts, 1):
            words = line.partition("#")[0].split()
            if name in words[1:] and (words[0].startswith("127.") or words[0] == "::1"):
                return number
    return None


def _bind_error(port: int) -> int:
    """Return 0 if this machine can listen on the port, as the store will, else the errno."""
    family = socket.AF_INET6 if Path("/proc/net/if_inet6").exists() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0


def _holder(port: int) -> str:
    """Return " by pid 123 (command line)" where /proc shows who listens on the port."""
    sockets = {f"socket:[{inode}]" for inode in _listeners(port)}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has gone, or is not ours to see
            if os.readlink(link) in sockets:
                process = link.parents[1]
                command = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
                return f" by pid {process.name} ({' '.join(command.split())[:80]})"
    return ""


def _listeners(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on the port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _interfaces() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())


def _no_interface(variable: str, wanted: str) -> Fault:
    cause = f"{variable}={wanted} names no interface of this machine"
    return Fault("no-such-interface", cause, f"name one of {_interfaces()}")


def _existing(directory: Path) -> Path:
    """Return the nearest folder that is there already."""
    while not directory.exists():
        directory = directory.parent
    return directory


def _try_write(directory: Path) -> None:
    probe = directory / f".preflight-{os.getpid()}"
    probe.write_bytes(b"\0")
    probe.unlink()


def _unreached(address: str, port: int, limit_s: float, error: OSError) -> Fault:
    cause = f"no master at {address}:{port} within {limit_s:.0f} s"
    if isinstance(error, socket.gaierror):
        return Fault("name-unresolved", f"{cause} (the name is unknown)", "correct it")
    if isinstance(error, ConnectionRefusedError):
        return Fault("node-missing", f"{cause} (nothing listens there)", "start node rank 0")
    if isinstance(error, TimeoutError):
        return Fault("port-blocked", f"{cause} (no answer at all)", "open the port in the firewall")
    return Fault("host-unreachable", f"{cause} ({error.strerror})", "see that the machine is up")


if __name__ == "__main__":
    sys.exit(main())
