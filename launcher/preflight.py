"""Are the machines fit for the run? Small named checks, before anything starts.

    python -m launcher.preflight --run-id ID -- train.py     check this node
    python -m launcher.preflight --compare <ANSWERS          compare what all nodes have printed

Prints what the plan needs to know as name=value lines on stdout, and each fault as one line on
stderr. Exit code 3 when one refuses the start. No torch import, so it is instant.

Where the nodes are started together, they meet at the master's port meanwhile: node rank 0 listens
there until all the others have come, and tells them what they are to compare with.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import json
import os
import resource
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from distributed.environment import port_from_id
from distributed.network import interface_to
from launcher import checkin, identity
from launcher.failure import count
from launcher.gpus import Gpu, GpuError, visible_gpus

LEAST_FILES = 1024  # open files of one process; Linux's own default
LEAST_SHM = 512 << 20  # bytes; Docker's default of 64 MiB is too small for data workers
LEAST_DISK = 2 << 30  # bytes free where checkpoints go
LEAST_MEMLOCK = 64 << 10  # bytes; Linux's own default before 5.16
LEAST_MEMLOCK_INFINIBAND = 1 << 30  # bytes; every buffer on the wire is locked memory
ANSWER_S = 3.0  # a connection that nothing answers for so long is dropped
PIECE = 900  # characters; srun mixes the nodes' lines where they are longer than 1024


@dataclass(frozen=True)
class Fault:
    """What is wrong under its name in TROUBLESHOOTING.md, and the cure. Some only warn."""

    name: str
    cause: str
    cure: str
    warns: bool = False


@dataclass(frozen=True)
class Machine:
    """This node's part in the plan, and what was found out about the node."""

    run_id: str
    nnodes: int
    node_rank: int
    nproc: int
    master_addr: str
    port: int
    port_error: int  # errno where it cannot be opened
    script: Path | None
    directories: tuple[Path, ...]  # logs and checkpoints
    gpus: tuple[Gpu, ...]
    gpu_error: str  # why they could not be looked at
    environ: Mapping[str, str]


@dataclass(frozen=True)
class PreflightReport(identity.NodeReport):
    """What a node says of itself, for the launcher to compare with what the others say."""

    told: Sequence[str] = ()  # the names of the faults that it has told itself
    met: Sequence[Fault] = ()  # those found at the master's port, if node rank 0 was there


def check_program(machine: Machine) -> Iterator[Fault]:
    """This Python has torch, and the training script is here."""
    if importlib.util.find_spec("torch") is None:
        cure = "run make setup, or set VENV, CONDA_ENV or PYTHON"
        yield Fault("env-missing", f"{sys.executable} has no torch", cure)
    elif machine.script and not machine.script.is_file():
        yield Fault(
            "env-missing", f"there is no script {str(machine.script)!r}", "correct its path"
        )


def check_gpus(machine: Machine) -> Iterator[Fault]:
    """One process per visible GPU at most, each sound and idle; without any, all run on the CPU."""
    if 0 < len(machine.gpus) < machine.nproc:
        cause = f"{machine.nproc} processes but {count(len(machine.gpus), 'visible GPU')}"
        yield Fault("too-few-gpus", cause, "ask for fewer, or see CUDA_VISIBLE_DEVICES")
    cure = "have the GPU reset or replaced, or leave it out with CUDA_VISIBLE_DEVICES"
    if machine.gpu_error:
        yield Fault("gpu-unhealthy", machine.gpu_error, cure)
    for gpu in machine.gpus:
        if gpu.memory_errors:
            cause = f"GPU {gpu.index} has {count(gpu.memory_errors, 'uncorrected memory error')}"
            yield Fault("gpu-unhealthy", cause, cure)
        if gpu.processes:
            cause = f"GPU {gpu.index} is in use by {', '.join(gpu.processes)}"
            yield Fault("gpu-unhealthy", cause, "wait for it, or choose another GPU", warns=True)


def check_master(machine: Machine) -> Iterator[Fault]:
    """The master's name means something here, other nodes can reach it, and its port is free."""
    name, port = machine.master_addr, machine.port
    addresses = []
    try:
        addresses = [str(address[0]) for *_, address in socket.getaddrinfo(name, None)]
    except OSError:
        cause = f"the master's name {name!r} is unknown"
        yield Fault("name-unresolved", cause, "correct it, or give its address")
    loopback = [address for address in addresses if _is_loopback(address)]
    if machine.nnodes > 1 and loopback:
        cause = f"the master {name} is {loopback[0]}, which no other machine can reach"
        literal = name in ("localhost", "127.0.0.1", "::1")  # maybe all nodes are this machine
        if not literal and (line := _hosts_line(name)):
            cause += f" (/etc/hosts line {line})"
        cure = "give the master's address on the network the nodes share"
        yield Fault("loopback-address", cause, cure, warns=literal)
    if machine.nnodes > 1 and machine.node_rank == 0 and addresses and not _is_here(addresses[0]):
        cause = f"the master's address {addresses[0]} is not of this machine"
        cure = "give node rank 0's in MASTER_ADDR, unless a router translates it"
        yield Fault("no-such-interface", cause, cure, warns=True)
    if machine.port_error == errno.EADDRINUSE:
        holder = _holder(port)
        if f" --rdzv-id {machine.run_id} " in holder:
            cause = f"run {machine.run_id} is live: its node agent runs here"
            yield Fault("run-is-live", cause, "wait for its end, or choose another RUN_ID")
            return
        cause = f"port {port} is taken{holder[:120]}"
        yield Fault("port-in-use", cause, "end that, or choose another with MASTER_PORT")
    elif machine.port_error:
        cause = f"port {port} cannot be opened ({os.strerror(machine.port_error)})"
        yield Fault("port-in-use", cause, "choose one above 1023 with MASTER_PORT")


def check_interfaces(machine: Machine) -> Iterator[Fault]:
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where set, name interfaces of this machine."""
    names = [name for _, name in socket.if_nameindex()]
    leads = interface_to(machine.master_addr)
    cure = f"unset it, or name one of {', '.join(names)}"
    if leads not in (None, "lo"):
        cure = f"unset it, or name {leads}, which leads to the master"
    gloo = machine.environ.get("GLOO_SOCKET_IFNAME", "")
    if gloo and not set(gloo.split(",")) <= set(names):
        cause = f"GLOO_SOCKET_IFNAME={gloo} is not of this machine"
        yield Fault("no-such-interface", cause, f"{cure} (to exclude with ^ is NCCL's alone)")
    if nccl := machine.environ.get("NCCL_SOCKET_IFNAME", ""):
        marks, words = nccl[:2], nccl.lstrip("^=").split(",")  # prefixes, =exact or ^excluded
        named = {name for name in names if name.startswith(tuple(words))}
        if "=" in marks:
            named &= set(words)
        if not (set(names) - named if "^" in marks else named):
            cause = f"NCCL_SOCKET_IFNAME={nccl} leaves no interface of this machine"
            yield Fault("no-such-interface", cause, cure)


def check_limits(machine: Machine) -> Iterator[Fault]:
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


def check_folders(machine: Machine) -> Iterator[Fault]:
    """There is room where logs and checkpoints go, and a real write succeeds."""
    for directory in machine.directories:
        place = _existing(directory)
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


COMPARED = 6  # versions, files, the master's port, any other port, clocks, a shared folder


# --- all nodes ----------------------------------------------------------------------------------


def meet(args: argparse.Namespace, port: int, faults: list[Fault]) -> None:
    """Meet the other nodes, while this one is checked; what is found is added to `faults`."""
    deadline = time.monotonic() + args.within
    if args.node_rank != 0:
        faults += visit_master(args.master_addr, port, deadline)
        return
    # A job may start again on other nodes. Else node rank 0 alone needs the checkpoints.
    is_shared = args.checkpoint_dir and "SLURM_JOB_ID" in os.environ
    folder = args.directory / args.checkpoint_dir if is_shared else None
    receive_others(port, args.meet - 1, folder, deadline)


def receive_others(port: int, number: int, folder: Path | None, deadline: float) -> None:
    """On node rank 0: wait at the port for so many nodes, and tell each what to compare with."""
    with contextlib.ExitStack() as stack:
        listener, other = (stack.enter_context(checkin.open_port(one)) for one in (port, 0))
        greeting = {"port": other.getsockname()[1], "file": ""}
        if folder is not None:
            with contextlib.suppress(OSError):  # which check_folders tells
                greeting["file"] = stack.enter_context(
                    tempfile.NamedTemporaryFile(dir=_existing(folder), prefix=".shared-")
                ).name
        visitors: list[socket.socket] = []
        while len(visitors) < number and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with contextlib.suppress(OSError):
                visitor = stack.enter_context(listener.accept()[0])
                visitor.sendall(json.dumps({**greeting, "time": time.time()}).encode() + b"\n")
                visitors.append(visitor)
        for visitor in visitors:
            visitor.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                visitor.recv(1)  # its end: that node has tried the port and seen the file


def visit_master(address: str, port: int, deadline: float) -> Iterator[Fault]:
    """On any other node: reach node rank 0, and compare this node's clock and folder with its."""
    cure = "open the port in the firewall"
    try:
        with _connect(address, port, deadline) as master:
            greeting = json.loads(master.makefile().readline())
            skew = time.time() - greeting["time"]
            if abs(skew) > checkin.SKEW_S:
                cause = f"the clock is {skew:+.0f} s from node rank 0's"
                yield Fault("clock-skew", cause, "have both synchronised", warns=True)
            if greeting["file"] and not os.path.exists(greeting["file"]):
                cause = f"{os.path.dirname(greeting['file'])!r} is another folder on node rank 0"
                advice = "choose a checkpoint.dir that all nodes share: the job may move"
                yield Fault("dir-not-shared", cause, advice)
            port, cure = greeting["port"], "open all ports between the nodes, for gloo and NCCL"
            _connect(address, port, deadline=0).close()
    except socket.gaierror:
        pass  # check_master tells it
    except OSError as error:
        is_silent = isinstance(error, TimeoutError)
        why = f"no answer in {ANSWER_S:g} s" if is_silent else error.strerror
        yield Fault("port-blocked", f"no way to {address}:{port} ({why})", cure)
    except (ValueError, KeyError, TypeError):
        pass  # this was another program; node rank 0 tells it


def _connect(address: str, port: int, deadline: float) -> socket.socket:
    """Connect; until the deadline node rank 0 may be later than this node, and refuse."""
    while True:
        try:
            return socket.create_connection((address, port), timeout=ANSWER_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def compare(answers: Iterable[PreflightReport]) -> Iterator[tuple[str, Fault]]:
    """Yield host and fault where a node is not as the first, or cannot reach node rank 0."""
    first, *others = sorted(answers, key=lambda answer: answer.node_rank)
    is_master_there = first.node_rank == 0 and not {"port-in-use", "run-is-live"} & {*first.told}
    for node in others:
        for name, cause in identity.mismatches(first, node):
            yield node.host, Fault(name, cause, "make them the same")
        if is_master_there:
            yield from ((node.host, fault) for fault in node.met)


# --- the command --------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Check this node, or compare what all nodes have printed; returns the exit code."""
    args = parse_arguments(arguments)
    return compare_nodes(sys.stdin, args.strict) if args.compare else check_node(args)


def choose_port(run_id: str, *, search: bool) -> int:
    """Return the port that belongs to the run id; with `search`, the next free one after it."""
    port = port_from_id(run_id)
    while search and bind_error(port) == errno.EADDRINUSE:
        port += 1
    return port


def bind_error(port: int) -> int:
    """Return 0 if this machine can listen on the port, as the store will, else the errno."""
    try:
        checkin.open_port(port).close()
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


def check_node(args: argparse.Namespace) -> int:
    """Check this node; meet the others meanwhile."""
    start = time.perf_counter()
    is_alone = args.nnodes == 1
    port = choose_port(args.run_id, search=is_alone) if args.port == "auto" else int(args.port)
    port_error = bind_error(port) if args.node_rank == 0 else 0
    met: list[Fault] = []
    meeting = threading.Thread(target=meet, args=(args, port, met))
    if args.checks and args.meet > 1 and not port_error:
        meeting.start()
    machine = examine(args, os.environ, port, port_error)
    checks = CHECKS if args.checks else {}
    faults = [fault for check in checks for fault in check(machine)]
    if meeting.ident is not None:  # it was started
        meeting.join()
    print(f"gpus={len(machine.gpus)}", f"nproc={machine.nproc}", f"port={machine.port}", sep="\n")
    print(f"checks={sum(checks.values())}", f"warnings={len(faults)}", sep="\n")
    if checks and not is_alone:
        files = identity.hash_files(args.program, args.directory)
        if machine.script is not None:
            files.setdefault(machine.script.name, "")
        answer = PreflightReport(
            node_rank=args.node_rank,
            num_nodes=args.nnodes,
            nproc=machine.nproc,
            host=_host(),
            run_id=args.run_id,
            versions=identity.versions(),
            files=files,
            told=[fault.name for fault in faults],
            met=met,
        )
        print_answer(answer)
    print(f"seconds={time.perf_counter() - start:.3f}")
    return report(faults, strict=args.strict, host=_host())


def print_answer(answer: PreflightReport) -> None:
    """Print it in pieces that srun does not tear, and without spaces, which bash would strip."""
    text = json.dumps(asdict(answer), separators=(",", ":")).replace(" ", r"\u0020")
    for start in range(0, len(text), PIECE):
        print(f"node={answer.node_rank} {text[start : start + PIECE]}")


def read_answers(lines: Iterable[str]) -> Iterator[PreflightReport]:
    """Yield the answers among what the nodes have printed, in whatever order."""
    pieces: dict[str, str] = {}
    for line in lines:
        if line.startswith("node="):
            node_rank, piece = line.removeprefix("node=").split()
            pieces[node_rank] = pieces.get(node_rank, "") + piece
    for text in pieces.values():
        fields = json.loads(text)
        yield PreflightReport(**{**fields, "met": [Fault(**fault) for fault in fields["met"]]})


def compare_nodes(lines: Iterable[str], strict: bool) -> int:
    """Compare what the nodes have printed; prints what that changes in the plan."""
    answers = list(read_answers(lines))
    found = list(compare(answers)) if answers else []
    print(f"checks={sum(CHECKS.values()) + COMPARED}")
    print(f"warnings={sum(len(answer.told) for answer in answers) + len(found)}")
    return max((report([fault], strict=strict, host=host) for host, fault in found), default=0)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the launcher's words; it has checked them."""
    parser = argparse.ArgumentParser(prog="python -m launcher.preflight")
    parser.add_argument("--nnodes", type=int, default=1)
    step_rank = os.environ.get("SLURM_NODEID") or 0
    parser.add_argument("--node-rank", type=int, default=step_rank)
    parser.add_argument("--nproc", default="auto", help="auto: one per GPU, else --cpu-nproc")
    parser.add_argument("--cpu-nproc", type=int, default=1)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--port", default="auto", help="auto: from the run id")
    parser.add_argument("--run-id", default="")
    parser.add_argument("program", nargs="*", metavar="-- SCRIPT ARGUMENTS")
    parser.add_argument("--meet", type=int, default=0, help="so many nodes meet at the port")
    parser.add_argument("--within", type=float, default=7.0, help="seconds for all to have come")
    parser.add_argument("--directory", type=Path, default=Path(), help="where relative paths begin")
    parser.add_argument("--log-dir", default="logs")
    parser.add_argument("--checkpoint-dir", default="")
    parser.add_argument("--strict", action="store_true", help="a warning refuses too")
    parser.add_argument("--no-checks", dest="checks", action="store_false")
    parser.add_argument("--compare", action="store_true", help="the answers on stdin")
    return parser.parse_args(arguments)


def examine(
    args: argparse.Namespace, environ: Mapping[str, str], port: int, port_error: int
) -> Machine:
    """Return the node as the plan and the machine together make it."""
    try:
        gpus, gpu_error = visible_gpus(environ), ""
    except GpuError as error:
        gpus, gpu_error = (), str(error)
    given = int(environ.get("SLURM_GPUS_ON_NODE") or 0)
    script = args.program[0] if args.program and args.program[0] != "-m" else ""
    return Machine(
        run_id=args.run_id,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        nproc=(len(gpus) or given or args.cpu_nproc) if args.nproc == "auto" else int(args.nproc),
        master_addr=args.master_addr,
        port=port,
        port_error=port_error,
        script=args.directory / script if script else None,
        directories=tuple(args.directory / d for d in (args.log_dir, args.checkpoint_dir) if d),
        gpus=gpus,
        gpu_error=gpu_error,
        environ=environ,
    )


def report(faults: Sequence[Fault], *, strict: bool, host: str) -> int:
    """Print one line per fault; returns 3 if one refuses the start, else 0."""
    program = os.environ.get("PROGRAM", "preflight")
    refusals = [fault for fault in faults if strict or not fault.warns]
    for fault in faults:
        kind = "" if fault in refusals else "warning: "
        line = f"{program}: {kind}{host}: {fault.cause}; {fault.cure} [{fault.name}]"
        print(line, file=sys.stderr)
    return 3 if refusals else 0


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def _existing(directory: Path) -> Path:
    """Return the directory, or what of the way to it exists."""
    return next(path for path in (directory, *directory.parents) if os.path.exists(path))


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _is_here(address: str) -> bool:
    """Whether it is an address of this machine, where something could listen."""
    with contextlib.suppress(OSError):
        family, kind, *_, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
            return True
    return False


def _hosts_line(name: str) -> int | None:
    """Return the number of the line of /etc/hosts that makes the name a loopback address."""
    for number, line in enumerate(Path("/etc/hosts").read_text().splitlines(), 1):
        address, *names = line.partition("#")[0].split() or [""]
        if name in names and _is_loopback(address):
            return number
    return None


def _holder(port: int) -> str:
    """Return " by pid 123 (command line)" where /proc shows who listens on the port."""
    listeners = set()
    for table in Path("/proc/net").glob("tcp*"):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                listeners.add(f"socket:[{fields[9]}]")
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has gone, or is not ours to see
            if os.readlink(file) in listeners:
                process = file.parents[1]
                command = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
                return f" by pid {process.name} ({' '.join(command.split())})"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
