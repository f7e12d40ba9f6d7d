"""Check one node before anything starts: find its faults, and what the plan needs to know.

    python scripts/lib/start.py launcher.preflight.check_node REQUEST      in a container

It prints a Report. If the nodes are started together, they also meet at the master's port. It does
not import torch, so it takes a few hundredths of a second.
"""

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from launcher.handshake import read_access
from launcher.master_port import open_master_port
from launcher.preflight import between_nodes, cgroup, infiniband, must_match
from launcher.preflight.checks import CHECKS, Machine, check_gpus, warning
from launcher.preflight.gpus import GpuError, visible_gpus
from launcher.text import Environ, short_host_name, whole
from launcher.typed_json import parse
from launcher.wire.launcher_link import Answers, send_message
from launcher.wire.meeting import Wait
from launcher.wire.messages import Fault, Faults, Member, NodeReport, Report, Request

MARK = "node"  # begins the messages of a node (launcher_link.py)


def check_node(request: Request, environ: Environ) -> Report:
    """Check this node, and meet the others at the same time, for the clocks, links and folders.

    Waits for the others for up to `request.within_s`. Closes the master's port again. Without
    `request.has_checks`, only counts the GPUs and chooses the port. Raises PlanError or
    HostlistError if the nodes meet, and RUN_SECRET or HOSTS cannot be used.
    """
    start = time.perf_counter()
    port, listener, port_error = open_master_port(request)
    is_compared = request.has_checks and request.num_nodes > 1

    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(_meet, request, port, listener, environ)
        machine = _examine_machine(request, environ, port, port_error)
        faults = list[Fault]()
        if request.has_checks:
            faults = [*_run_checks(machine)]
        elif machine.nproc == 0:  # no number of ranks is known
            cure = "give the number of processes"
            faults = [replace(fault, cure=cure) for fault in check_gpus(machine)]
        files = must_match.hash_files(request.words, request.directory) if is_compared else {}

    if is_compared and machine.script:
        files.setdefault(machine.script.name, "")  # check_program() reports a missing script
    met, done = meeting.result()

    return Report(
        node_rank=request.node_rank,
        num_nodes=request.num_nodes,
        nproc=machine.nproc or 1,  # a report needs one; check_gpus() reports 0
        host=short_host_name(),
        run_id=request.run_id,
        versions=must_match.versions() if is_compared else {},
        files=files,
        port=port,
        gpus=len(machine.gpus),
        cpus=machine.cpus,
        faults=faults,
        met=met,
        done=done,
        seconds=time.perf_counter() - start,
    )


def _run_checks(machine: Machine) -> Faults:
    """Run all checks. A check that uses what a sandbox refuses only warns."""
    for check in CHECKS:
        try:
            yield from check(machine)
        except OSError as error:
            what = check.__name__.removeprefix("check_").replace("_", " ")
            cause = f"the check of the {what} failed ({error.strerror})"
            yield warning("not-checked", cause, "if the run starts, nothing needs to be done")


def _meet(
    request: Request, port: int, listener: socket.socket | None, environ: Environ
) -> tuple[Sequence[Fault], Sequence[str]]:
    """Return the faults found at the master's port, and the names of the checks made there.

    Both are empty if the nodes do not meet; node rank 0 names no checks. Closes the listener.
    Raises PlanError or HostlistError if RUN_SECRET or HOSTS cannot be used.
    """
    can_meet = request.node_rank != 0 or listener is not None
    if not (request.has_checks and request.meeting_size > 1 and can_meet):
        if listener:
            listener.close()
        return (), ()

    wait = Wait(request.within_s)
    address = request.master_addr
    host = short_host_name()
    access = read_access(environ)
    if not listener:
        me = NodeReport(request.node_rank, request.num_nodes, 1, host, request.run_id)
        return between_nodes.join_meeting(address, port, me, access.secret, wait)

    # A SLURM job may restart on other nodes. Outside SLURM, full checkpoints are only for node
    # rank 0, and the ranks themselves check the folder of sharded ones.
    folder = None
    if request.checkpoint_dir and "SLURM_JOB_ID" in environ:
        folder = request.directory / request.checkpoint_dir
    first = Member(0, host, 1, address)
    others = request.meeting_size - 1
    return between_nodes.host_meeting(listener, first, access, others, folder, wait), ()


def _examine_machine(request: Request, environ: Environ, port: int, port_error: int) -> Machine:
    """Return what the checks need: the request with its open questions answered, and the machine.

    Waits for nvidia-smi or rocm-smi. `nproc` is 0 if the number of ranks is not known: the GPUs
    cannot be counted, or there is none although the ranks need one.
    """
    try:
        gpus = visible_gpus(environ)
        gpu_error = ""
    except GpuError as error:
        gpus = ()
        gpu_error = str(error)

    nproc = request.nproc or len(gpus) or whole(environ.get("SLURM_GPUS_ON_NODE", ""))
    if nproc == 0 and not gpu_error:
        nproc = request.cpu_nproc

    return Machine(
        request=request,
        nproc=nproc,
        port=port,
        port_error=port_error,
        gpus=gpus,
        gpu_error=gpu_error,
        environ=environ,
        cpus=cgroup.count_cpus(),
        ports=tuple(infiniband.read_ports()),
        can_open_ports=infiniband.can_open_devices(),
    )


def read_report(output: bytes) -> Report | None:
    """Return the report in the output of main(); None if there is none."""
    _, received = Answers(MARK).read(output)
    return next((report for _, report in received if isinstance(report, Report)), None)


def main(arguments: Sequence[str], environ: Environ) -> int:
    """Check this node as requested, and print the Report as a message. Returns 0."""
    send_message(f"{MARK}.0", check_node(parse(Request, arguments[0]), environ))
    return 0
