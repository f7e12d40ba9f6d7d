"""Join a run: check in with the other nodes' agents, and on node rank 0 begin run.json."""

import os
import platform
import re
import socket
from pathlib import Path

import torch

from distributed import network
from distributed.environment import new_run_id
from launcher.agent.nodes import checkin
from launcher.agent.output.stream import say
from launcher.agent.torchrun_arguments import Arguments
from launcher.preflight import must_match
from launcher.record.run_json import LauncherProcess, LiveRecord
from launcher.wire.messages import Assignment, NodeReport


def join_run(args: Arguments, *, is_by_hand: bool) -> checkin.Meeting:
    """Meet the other nodes' agents to settle the run id, the ranks and the hosts.

    1. Describe this node. Its files are compared, unless a preflight has compared them.
    2. Check in, within `join_timeout_s`. Without a launcher (`is_by_hand`), test the connections.
    3. In `args.environ`, set network variables (printed), and remove LAUNCH_TASK_FILE. Raises
       Refused if the run cannot start.
    """
    files = dict[str, str]()
    environ = args.environ
    is_first_node = args.node_rank == 0
    is_skipped = environ.get("SKIP_PREFLIGHT") == "1"
    task_file = environ.pop("LAUNCH_TASK_FILE", "")
    agents = args.num_nodes + args.num_spares
    if agents > 1:
        if is_by_hand or is_skipped:
            words = [args.program.name, *args.program.arguments]
            files = must_match.describe_program(words, task_file, skips_arguments=is_skipped)
        if not args.access.secret and is_first_node:
            who = "a process on any of HOSTS" if args.access.addresses else "anyone on the network"
            where = f"port {args.master_port} on {args.master_addr}"
            say(f"warning: {who} can join this run at {where}; set RUN_SECRET [stranger]")

    me = NodeReport(
        node_rank=args.node_rank,
        num_nodes=agents,
        nproc=args.nproc,
        host=socket.gethostname(),
        run_id=args.run_id or (new_run_id() if is_first_node else ""),
        versions=versions(),
        files=files,
    )

    named = environ.get("GLOO_SOCKET_IFNAME") or environ.get("NCCL_SOCKET_IFNAME", "")
    ranks_use_it = not named or network.interface_to(args.master_addr) in re.split("[,=]", named)
    has_terminal = is_by_hand and not args.is_in_step  # to itself
    meeting = checkin.meet(
        args.master_addr,
        args.master_port,
        me,
        args.access,
        args.join_timeout_s,
        num_spares=args.num_spares,
        min_nodes=args.min_nodes,
        is_by_hand=has_terminal,
        tries_pairs=is_by_hand and ranks_use_it and not is_skipped,
    )

    chosen = network.choose_variables(args.master_addr, agents, environ)  # it resolves by now
    environ.update(chosen)
    if chosen and is_first_node and agents > 1:
        exact = " (= before a name: only this one)" if "NCCL_SOCKET_IFNAME" in chosen else ""
        say(f"setting {' '.join(f'{name}={value}' for name, value in chosen.items())}{exact}")

    if has_terminal and not is_first_node:
        own = meeting.assignment
        where = f"{own.hosts[0]} ({args.master_addr}:{args.master_port})"
        say(f"checked in with node rank 0 on {where}, as node rank {own.node_rank}")
    return meeting


def begin_record(folder: Path, args: Arguments, own: Assignment, *, is_by_hand: bool) -> LiveRecord:
    """Begin run.json in the run's folder, or take it over from a lost node's agent.

    If no launcher has recorded itself (`is_by_hand`), the supervisor is recorded as the process
    that --stop signals. Raises Refused if another live process has the run, or if the folder is
    not writable.
    """
    launcher = {"launcher": LauncherProcess.of(os.getppid())} if is_by_hand else {}
    return LiveRecord(
        folder,
        **launcher,
        attempt=own.attempt,
        command=args.command,
        versions={**versions(), "kernel": platform.release()},
        agent_arguments=args.typed,
        hosts=own.hosts,
        world_size=own.world_size,
        grace=args.grace_s,
    )


def versions() -> dict[str, str]:
    """Return the versions that must be the same on every node.

    A preflight has compared all but NCCL's, which it cannot read without importing torch.
    """
    found = must_match.versions()
    if torch.distributed.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(map(str, nccl))
    return found
