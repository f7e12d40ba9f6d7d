"""Fork the ranks of one node, each with its streams, variables and CPUs."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.utils.api import macros

from launcher.agent.node_ranks import Rank
from launcher.agent.output.stream import Stream, open_stream, say
from launcher.agent.output.terminal import Terminal
from launcher.agent.rank.program import run_and_exit
from launcher.agent.rank_environment import rank_variables
from launcher.record.run_json import writing_to

if TYPE_CHECKING:
    from launcher.agent.agent import NodeAgent

STREAMS = {"stdout": Std.OUT, "stderr": Std.ERR}


def fork_ranks(node: NodeAgent, attempt: int) -> list[Rank]:
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
                copy=_stream_file(node, number, attempt, name) if one in kept else None,
            )
            for terminal, (name, one) in zip(terminals, STREAMS.items(), strict=True)
        ]
        (stdout, out), (stderr, err) = streams
        variables = rank_variables(node.args, node.assignment, local_rank, node.port, attempt)
        variables |= node.network.variables if number == 0 else {}
        variables |= node.snapshots.variables(local_rank)
        variables["HEARTBEAT_FILE"] = node.heartbeats.name(local_rank)
        variables["TORCHELASTIC_ERROR_FILE"] = str(error_file)
        if (pid := os.fork()) == 0:
            _close_all(node, out, err, *{*node.terminals}, *ranks)
            words = macros.substitute(list(node.args.program.arguments), str(local_rank))
            program = replace(node.args.program, arguments=tuple(words))
            if cpus := node.cpus[local_rank]:
                os.sched_setaffinity(0, cpus)
            run_and_exit(program, variables, stdout=stdout, stderr=stderr, parent=agent)
        os.close(stdout)
        os.close(stderr)
        ranks.append(Rank(number, local_rank, pid, (out, err), error_file))
    return ranks


def _stream_file(node: NodeAgent, number: int, attempt: int, name: str) -> Path:
    """Return the file for one stream of a rank that --redirects or --tee names."""
    if node.streams is None:
        node.streams = Path(tempfile.mkdtemp(prefix="torchelastic_"))
        say(f"the streams that --redirects or --tee names are in {node.streams}")
    folder = node.streams / f"attempt_{attempt}" / str(number)
    with writing_to(folder):
        return folder / f"{name}.log"


def _close_all(node: NodeAgent, *private: Stream | Terminal | Rank) -> None:
    """In a rank, close what is the agent's: through its objects, so that none closes twice."""
    node.guardian.close()
    node.log.close()
    if node.listener is not None:
        node.listener.close()
    if node.meeting.door is not None:
        node.meeting.door.close()
    spares = node.meeting.team.spares if node.meeting.team is not None else {}
    for peer in (*node.meeting.peers.values(), *spares.values()):
        peer.close()
    for one in private:
        one.close()
