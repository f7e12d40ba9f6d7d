"""Fork the ranks of one node, each with its streams, variables, GPU and CPUs."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import is_nccl_available
from torch.distributed.elastic.multiprocessing import Std

from distributed.errors import Refused
from distributed.torch_internals import RECORDER_SIZE, cpus_near_gpu, has_numa_binding
from launcher import processes
from launcher.agent.assignment import Assignment
from launcher.agent.node_ranks import Rank
from launcher.agent.output.stream import Stream, open_stream, say
from launcher.agent.output.terminal import Terminal
from launcher.agent.rank.flight_recorder import DEFAULT_SIZE
from launcher.agent.rank.program import run_and_exit
from launcher.agent.torchrun_arguments import Arguments
from launcher.record.run_json import writing_to

if TYPE_CHECKING:
    from launcher.agent.agent import NodeAgent

STREAMS = {"stdout": Std.OUT, "stderr": Std.ERR}


def fork_ranks(node: NodeAgent) -> list[Rank]:
    """Fork the ranks of an attempt. Each rank runs its program and leaves by SystemExit."""
    ranks: list[Rank] = []
    agent = os.getpid()
    first = node.assignment.first_rank
    shown = node.args.shown_ranks(first, has_log=node.folder is not None)
    is_alone = len(shown) == 1 and not node.args.has_labels
    for local_rank in range(node.args.nproc):
        number = first + local_rank
        error_file = node.error_files / f"rank_{number}.json"
        error_file.unlink(missing_ok=True)
        terminals = node.terminals if local_rank in shown else (None, None)
        kept = node.args.redirected[local_rank] | node.args.teed[local_rank]
        hidden = node.args.redirected[local_rank] & ~node.args.teed[local_rank]
        streams = [
            open_stream(
                number,
                node.log,
                None if one in hidden else terminal,
                is_alone=is_alone,
                has_label=node.args.has_labels,
            )
            for terminal, one in zip(terminals, STREAMS.values(), strict=True)
        ]
        for (_, stream), (name, one) in zip(streams, STREAMS.items(), strict=True):
            if one in kept:
                stream.copy = _stream_file(node, number, name).open("wb", buffering=0)
        (stdout, out), (stderr, err) = streams
        variables = _variables(node.args, node.assignment, local_rank, node.port)
        variables |= node.network.variables if number == 0 else {}
        variables |= node.snapshots.variables(local_rank)
        variables["HEARTBEAT_FILE"] = node.heartbeats.name(local_rank)
        variables["TORCHELASTIC_ERROR_FILE"] = str(error_file)
        if (pid := os.fork()) == 0:
            processes.take_name(f"rank{number}")
            _close_all(node, out, err, *{*node.terminals}, *ranks)
            if cpus := node.cpus[local_rank]:
                os.sched_setaffinity(0, cpus)
            run_and_exit(node.args.program, variables, stdout=stdout, stderr=stderr, parent=agent)
        os.close(stdout)
        os.close(stderr)
        ranks.append(Rank(number, local_rank, pid, (out, err), error_file))
    return ranks


def _stream_file(node: NodeAgent, number: int, name: str) -> Path:
    """Return the file for one stream of a rank that --redirects or --tee names."""
    if node.streams is None:
        node.streams = Path(tempfile.mkdtemp(prefix="torchelastic_"))
        say(f"the streams that --redirects or --tee names are in {node.streams}")
    folder = node.streams / f"attempt_{node.assignment.attempt}" / str(number)
    with writing_to(folder):
        return folder / f"{name}.log"


def _close_all(node: NodeAgent, *private: Stream | Terminal | Rank) -> None:
    """In a rank, close what is the agent's: through its objects, so that none closes twice."""
    node.guardian.close()
    node.log.close()
    if node.listener is not None:
        node.listener.close()
    if node.meeting.failover is not None:
        node.meeting.failover.close()
    team = node.meeting.team
    for peer in team.everyone() if team is not None else node.meeting.peers.values():
        peer.close()
    for one in private:
        one.close()


# --- what each rank is given --------------------------------------------------------------------


def _variables(
    args: Arguments, assignment: Assignment, local_rank: int, port: int
) -> dict[str, str]:
    """Return what torchrun adds to a rank's environment, and what is ours."""
    number = assignment.first_rank + local_rank
    variables = {
        "RANK": number,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": assignment.world_size,
        "LOCAL_WORLD_SIZE": args.nproc,
        "GROUP_RANK": args.node_rank,
        "GROUP_WORLD_SIZE": args.num_nodes,
        "ROLE_NAME": args.role,
        "ROLE_RANK": number,
        "ROLE_WORLD_SIZE": assignment.world_size,
        "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": assignment.run_id,
        "TORCHELASTIC_RESTART_COUNT": assignment.attempt,
        "TORCHELASTIC_MAX_RESTARTS": args.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        "RUN_ID": assignment.run_id,
    }
    if args.log_dir is not None:
        variables["LOG_DIR"] = args.log_dir
    if args.nproc > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = 1  # torchrun's choice
    if is_nccl_available() and RECORDER_SIZE not in os.environ:
        variables[RECORDER_SIZE] = DEFAULT_SIZE
    if args.has_virtual_ranks:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpu = local_rank if visible is None else visible.split(",")[local_rank].strip()
        variables |= {"LOCAL_RANK": 0, "CUDA_VISIBLE_DEVICES": gpu}
    return {name: str(value) for name, value in variables.items()}


def cpus_of_ranks(mode: str, nproc: int) -> Sequence[set[int] | None]:
    """Return the CPUs of each local rank as torchrun chooses them; None: those of the agent.

    Raises Refused where torch cannot tell. It asks CUDA, which the agent must not have used when it
    forks the ranks: a child does it.
    """
    if not mode:
        return [None] * nproc
    if not has_numa_binding:
        raise Refused("numa-unknown", "this torch cannot bind ranks; install torch 2.9 or newer")
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
        try:
            return [*child.map(partial(cpus_near_gpu, mode), range(nproc))]
        except Exception as error:
            cause = f"cannot bind ranks to the CPUs near their GPUs: {error}"
            raise Refused("numa-unknown", f"{cause}; leave NUMA_BINDING out") from None
