"""Is this machine fit for the run? Small named checks, run on each node before anything starts.

    python -m distributed.preflight --script train.py --run-id ID     check this node

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
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.environment import port_from_id
from distributed.gpus import Gpu, GpuError, visible_gpus

LEAST_FILES = 1024  # open files of one process; Linux's own default
LEAST_SHM = 512 << 20  # bytes; Docker's default of 64 MiB is too small for data workers
LEAST_DISK = 2 << 30  # bytes free where checkpoints go
LEAST_MEMLOCK = 64 << 10  # bytes; Linux's own default before 5.16
LEAST_MEMLOCK_INFINIBAND = 1 << 30  # bytes; every buffer on the wire is locked memory


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


def check_program(node: Node) -> Iterator[Fault]:
    """This Python has torch, and the training script is here."""
    if importlib.util.find_spec("torch") is None:
        cure = "run make setup, or set VENV, CONDA_ENV or PYTHON"
        yield Fault("env-missing", f"{sys.executable} has no torch", cure)
    elif node.script and not node.script.is_file():
        yield Fault("env-missing", f"there is no script {str(node.script)!r}", "correct its path")


def check_gpus(node: Node) -> Iterator[Fault]:
    """One process per visible GPU at most, each sound and idle; without any, all run on the CPU."""
    if 0 < len(node.gpus) < node.nproc:
        cause = f"{node.nproc} processes but {_count(len(node.gpus), 'visible GPU')}"
        yield Fault("too-few-gpus", cause, "ask for fewer, or see CUDA_VISIBLE_DEVICES")
    cure = "have the GPU reset or replaced, or leave it out with CUDA_VISIBLE_DEVICES"
    if node.gpu_error:
        yield Fault("gpu-unhealthy", node.gpu_error, cure)
    for gpu in node.gpus:
        if gpu.memory_errors:
            cause = f"GPU {gpu.index} has {_count(gpu.memory_errors, 'uncorrected memory error')}"
            yield Fault("gpu-unhealthy", cause, cure)
        if gpu.processes:
            cause = f"GPU {gpu.index} is in use by {', '.join(gpu.processes)}"
            yield Fault("gpu-unhealthy", cause, "wait for it, or choose another GPU", warns=True)


def check_master(node: Node) -> Iterator[Fault]:
    """The master's name means something here, other nodes can reach it, and its port is free."""
    name, port = node.master_addr, node.port
    addresses = []
    try:
        addresses = [str(address[0]) for *_, address in socket.getaddrinfo(name, None)]
    except OSError:
        cause = f"the master's name {name!r} is unknown"
        yield Fault("name-unresolved", cause, "correct it, or give its address")
    loopback = [address for address in addresses if _is_loopback(address)]
    if node.nnodes > 1 and loopback:
        cause = f"the master {name} is {loopback[0]}, which no other machine can reach"
        literal = name in ("localhost", "127.0.0.1", "::1")  # maybe all nodes are this machine
        if not literal and (line := _hosts_line(name)):
            cause += f" (/etc/hosts line {line})"
        cure = "give the master's address on the network the nodes share"
        yield Fault("loopback-address", cause, cure, warns=literal)
    code = _bind_error(port) if node.node_rank == 0 else 0
    if code == errno.EADDRINUSE:
        cause = f"port {port} is taken{_holder(port)}"
        yield Fault("port-in-use", cause, "end that, or choose another with MASTER_PORT")
    elif code:
        cause = f"port {port} cannot be opened ({os.strerror(code)})"
        yield Fault("port-in-use", cause, "choose one above 1023 with MASTER_PORT")


def check_interfaces(node: Node) -> Iterator[Fault]:
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where set, name interfaces of this machine."""
    names = [name for _, name in socket.if_nameindex()]
    cure = f"name one of {', '.join(names)}"
    gloo = node.environ.get("GLOO_SOCKET_IFNAME", "")
    if gloo and not set(gloo.split(",")) <= set(names):
        cause = f"GLOO_SOCKET_IFNAME={gloo} is not of this machine"
        yield Fault("no-such-interface", cause, f"{cure} (to exclude with ^ is NCCL's alone)")
    if nccl := node.environ.get("NCCL_SOCKET_IFNAME", ""):
        marks, words = nccl[:2], nccl.lstrip("^=").split(",")  # prefixes, =exact or ^excluded
        named = {name for name in names if name.startswith(tuple(words))}
        if "=" in marks:
            named &= set(words)
        if not (set(names) - named if "^" in marks else named):
            cause = f"NCCL_SOCKET_IFNAME={nccl} leaves no interface of this machine"
            yield Fault("no-such-interface", cause, cure)


def check_limits(node: Node) -> Iterator[Fault]:
    """Data workers pass descriptors and share /dev/shm with NCCL; InfiniBand locks its buffers."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1 is no limit
    if 0 <= files < LEAST_FILES:
        yield Fault("low-nofile", f"at most {files} open files", "ulimit -n 65536", warns=True)
    shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    if shm < LEAST_SHM:
        cure = "in Docker: --ipc=host or --shm-size=8g"
        yield Fault("small-shm", f"/dev/shm holds {shm >> 20} MiB", cure, warns=True)
    infiniband = Path("/sys/class/infiniband").is_dir()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if 0 <= locked < (LEAST_MEMLOCK_INFINIBAND if infiniband else LEAST_MEMLOCK):
        cause = f"at most {locked >> 10} KiB of locked memory"
        yield Fault("low-memlock", cause, "ulimit -l unlimited", warns=not infiniband)


def check_folders(node: Node) -> Iterator[Fault]:
    """There is room where logs and checkpoints go, and a real write succeeds."""
    for directory in node.directories:
        place = next(path for path in (directory, *directory.parents) if os.path.exists(path))
        free = shutil.disk_usage(place).free
        if free < LEAST_DISK:
            cause = f"{free >> 20} MiB free under {str(directory)!r}"
            yield Fault("disk-low", cause, "make room, or choose another folder", warns=True)
        try:
            with tempfile.TemporaryFile(dir=place) as probe:
                probe.write(b"\0")
        except OSError as error:
            cause = f"cannot write under {str(directory)!r} ({error.strerror})"
            yield Fault("dir-unwritable", cause, "choose another folder (LOG_DIR, checkpoint.dir)")


CHECKS = {  # and how many things each looks at
    check_program: 1,
    check_gpus: 3,
    check_master: 3,
    check_interfaces: 2,
    check_limits: 3,
    check_folders: 2,
}


def choose_port(run_id: str, *, search: bool) -> int:
    """Return the port that belongs to the run id; with `search`, the next free one after it."""
    port = port_from_id(run_id)
    while search and _bind_error(port) == errno.EADDRINUSE:
        port += 1
    return port


def main(arguments: Sequence[str]) -> int:
    """Check this node; returns the exit code."""
    start = time.perf_counter()
    args = parse_arguments(arguments)
    node = examine(args, os.environ)
    checks = CHECKS if args.checks else {}
    faults = [fault for check in checks for fault in check(node)]
    print(f"gpus={len(node.gpus)}", f"nproc={node.nproc}", f"port={node.port}", sep="\n")
    print(f"checks={sum(checks.values())}", f"warnings={len(faults)}", sep="\n")
    print(f"seconds={time.perf_counter() - start:.3f}")
    return report(faults, strict=args.strict)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the launcher's words; it has checked them."""
    parser = argparse.ArgumentParser(prog="python -m distributed.preflight")
    parser.add_argument("--nnodes", type=int, default=1)
    step_rank = os.environ.get("SLURM_NODEID") or 0
    parser.add_argument("--node-rank", type=int, default=step_rank)
    parser.add_argument("--nproc", default="auto", help="auto: one per GPU, else --cpu-nproc")
    parser.add_argument("--cpu-nproc", type=int, default=1)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--port", default="auto", help="auto: from the run id")
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
    try:
        gpus, gpu_error = visible_gpus(environ), ""
    except GpuError as error:
        gpus, gpu_error = (), str(error)
    given = int(environ.get("SLURM_GPUS_ON_NODE") or 0)
    port = choose_port(args.run_id, search=args.nnodes == 1) if args.port == "auto" else args.port
    return Node(
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        nproc=(len(gpus) or given or args.cpu_nproc) if args.nproc == "auto" else int(args.nproc),
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
    refusals = [fault for fault in faults if strict or not fault.warns]
    for fault in faults:
        kind = "" if fault in refusals else "warning: "
        line = f"{program}: {kind}{host}: {fault.cause}; {fault.cure} [{fault.name}]"
        print(line, file=sys.stderr)
    return 3 if refusals else 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _hosts_line(name: str) -> int | None:
    """Return the number of the line of /etc/hosts that makes the name a loopback address."""
    for number, line in enumerate(Path("/etc/hosts").read_text().splitlines(), 1):
        address, *names = line.partition("#")[0].split() or [""]
        if name in names and _is_loopback(address):
            return number
    return None


def _bind_error(port: int) -> int:
    """Return 0 if this machine can listen on the port, as the store will, else the errno."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


def _holder(port: int) -> str:
    """Return " by pid 123 (command line)" where /proc shows who listens on the port."""
    listeners = set()
    for table in Path("/proc/net").glob("tcp*"):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                listeners.add(f"socket:[{fields[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has gone, or is not ours to see
            if os.readlink(link) in listeners:
                process = link.parents[1]
                command = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
                return f" by pid {process.name} ({' '.join(command.split())[:80]})"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
