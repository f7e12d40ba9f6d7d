"""The agents' meeting at node rank 0, before any rank starts (no torch)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distributed.errors import Refused
from launcher.agent.agent_link import SILENCE_S, Assignment, Peer, Refusal, Welcome
from launcher.preflight.identity import NodeReport, mismatches

HELLO_S = 3.0  # for whoever connects to say that it is an agent
WELCOME_S = 3.0  # for an agent to greet another; torch's store, served there later, does not
TELL_S = 3.0  # a wait that takes longer says what it waits for
SKEW_S = 5.0  # a larger difference between clocks is reported
_RETRY_S = 0.1

Say = Callable[[str], None]


@dataclass(frozen=True)
class Meeting:
    """The outcome of check-in, for one node's agent."""

    assignment: Assignment
    peers: dict[int, Peer]  # on node rank 0 every other agent by node rank, else node rank 0's
    listener: socket.socket | None  # on node rank 0: where the agents met


def meet(address: str, port: int, me: NodeReport, timeout_s: float, say: Say) -> Meeting:
    """Meet the other nodes' agents at node rank 0.

    Raises:
        Refused: the run cannot start.
    """
    if me.node_rank == 0:
        listener = listen(address, port, is_local=me.num_nodes == 1)
        peers, assignment = gather(listener, me, timeout_s, say)
        return Meeting(assignment, peers, listener)
    hub, assignment = join(address, port, me, timeout_s, say)
    return Meeting(assignment, {0: hub}, None)


def listen(address: str, port: int, *, is_local: bool) -> socket.socket:
    """Listen on the master port (0: any free one); only on loopback where all ranks are here.

    Raises:
        Refused: the port is taken.
    """
    try:
        if is_local:
            family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(where[:2], family=family, backlog=4096)
        return open_port(port)
    except OSError as error:
        cause = f"port {port} on {address}: {error.strerror}"
        raise Refused("port-in-use", f"{cause}; set MASTER_PORT to a free one") from error


def open_port(port: int) -> socket.socket:
    """Listen on the port (0: any free one) at every address of this machine; raises OSError."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=4096)


def gather(
    listener: socket.socket, me: NodeReport, timeout_s: float, say: Say
) -> tuple[dict[int, Peer], Assignment]:
    """On node rank 0: wait until every other agent has checked in, and start them.

    Returns the others by node rank, and this node's part.

    Raises:
        Refused: a node did not come, came twice, or does not match this one; all are told.
    """
    start = time.monotonic()
    nodes: dict[int, NodeReport] = {me.node_rank: me}
    peers: dict[int, Peer] = {}
    visitors: list[Peer] = []  # they have checked in, and may yet be refused
    try:
        while len(nodes) < me.num_nodes:
            peer = _accept(listener, nodes, me.num_nodes, start, timeout_s, say)
            node = peer.wait(min(start + timeout_s, time.monotonic() + HELLO_S))
            if not isinstance(node, NodeReport):
                peer.close()  # a port scan, or a health check
                continue
            peer.send(Welcome())
            visitors.append(peer)
            _compare(me, node, nodes)
            skew = node.time - time.time()
            if abs(skew) > SKEW_S:
                say(f"warning: {node.host}'s clock is {skew:+.0f} s from {me.host}'s [clock-skew]")
            nodes[node.node_rank] = node
            peers[node.node_rank] = peer
    except Refused as refused:
        for peer in visitors:
            peer.send(Refusal(refused.fault, str(refused).rpartition(" [")[0]))
        raise
    assignments = assign_ranks(me.run_id, [nodes[rank] for rank in sorted(nodes)])
    for rank, peer in peers.items():
        peer.send(assignments[rank])
    return peers, assignments[me.node_rank]


def _accept(
    listener: socket.socket,
    nodes: Mapping[int, NodeReport],
    num_nodes: int,
    start: float,
    timeout_s: float,
    say: Say,
) -> Peer:
    """Wait for one more connection; after TELL_S say who is missing."""
    deadline, tell_at = start + timeout_s, start + TELL_S
    missing = ", ".join(str(rank) for rank in range(num_nodes) if rank not in nodes)
    for limit in (tell_at, deadline) if time.monotonic() < tell_at < deadline else (deadline,):
        listener.settimeout(max(0.0, limit - time.monotonic()))
        try:
            return Peer(listener.accept()[0])
        except (TimeoutError, BlockingIOError):
            pass
        if limit < deadline:
            say(f"waiting for node rank {missing}, {timeout_s:g} s at most")
    here = ", ".join(f"{node.node_rank} ({node.host})" for node in nodes.values())
    raise Refused(
        "node-missing",
        f"node rank {missing} did not check in within {timeout_s:g} s (here: {here});"
        " start it, or look at its terminal",
    )


def assign_ranks(run_id: str, nodes: Sequence[NodeReport]) -> list[Assignment]:
    """Return every node's part, by node rank: ranks follow node ranks."""
    counts = [node.nproc for node in nodes]
    return [
        Assignment(
            run_id=run_id,
            first_rank=sum(counts[:rank]),
            world_size=sum(counts),
            hosts=[node.host for node in nodes],
        )
        for rank in range(len(nodes))
    ]


def _compare(me: NodeReport, node: NodeReport, nodes: Mapping[int, NodeReport]) -> None:
    """Raise Refused where a node that has come cannot be part of this run."""
    if node.num_nodes != me.num_nodes or not 0 <= node.node_rank < me.num_nodes:
        raise Refused(
            "wrong-world",
            f"{node.host} was started as node {node.node_rank} of {node.num_nodes},"
            f" {me.host} as node 0 of {me.num_nodes}; give every node the same number",
        )
    if node.node_rank in nodes:
        first = nodes[node.node_rank].host
        raise Refused(
            "duplicate-node-rank",
            f"node rank {node.node_rank} was started twice, on {first} and on {node.host};"
            " give each node its own",
        )
    if node.run_id not in ("", me.run_id):
        raise Refused(
            "wrong-world",
            f"{node.host} has run id {node.run_id}, {me.host} has {me.run_id};"
            " do not set RUN_ID, or set the same one",
        )
    for fault, cause in mismatches(me, node):
        raise Refused(fault, f"{cause}; make them the same")


def join(
    address: str, port: int, me: NodeReport, timeout_s: float, say: Say
) -> tuple[Peer, Assignment]:
    """On any other node: check in with node rank 0, and wait for the start.

    Raises:
        Refused: node rank 0 cannot be reached in time, or refuses this node or the run.
    """
    start = time.monotonic()
    deadline = start + timeout_s
    last: OSError = TimeoutError("no answer")
    is_told = False
    turned_away: float | None = None  # since when
    while time.monotonic() < deadline:
        try:
            peer = Peer(socket.create_connection((address, port), timeout=min(3.0, timeout_s)))
            if assignment := _ask(peer, me, deadline):
                return peer, assignment
            peer.close()
            turned_away = turned_away or time.monotonic()
            if time.monotonic() - turned_away > SILENCE_S:
                cause = f"{address}:{port} takes no node rank {me.node_rank}: its run has begun"
                cure = "see whether this node rank was started elsewhere too"
                raise Refused("duplicate-node-rank", f"{cause}; {cure}")
        except OSError as error:
            last = error
        if not is_told and time.monotonic() > start + TELL_S:
            say(f"waiting for node rank 0 at {address}:{port}, {timeout_s:g} s at most")
            is_told = True
        time.sleep(_RETRY_S)
    fault, cure = _explain(last)
    cause = f"node rank 0 at {address}:{port} did not answer within {timeout_s:g} s"
    raise Refused(fault, f"{cause} ({last.strerror or last}); {cure}")


def _ask(peer: Peer, me: NodeReport, deadline: float) -> Assignment | None:
    """Report to node rank 0; returns its answer, None where there is no agent any more.

    Raises:
        Refused: node rank 0 refuses this node or the run.
    """
    peer.send(me)
    answer = peer.wait(min(deadline, time.monotonic() + WELCOME_S))
    if isinstance(answer, Welcome):
        answer = peer.wait(deadline)
    if isinstance(answer, Refusal):
        raise Refused(answer.fault, answer.message)
    return answer if isinstance(answer, Assignment) else None


def _explain(error: OSError) -> tuple[str, str]:
    """Return the fault behind a connection that failed, and its cure."""
    if isinstance(error, socket.gaierror):
        return "name-unresolved", "correct the master's name, or give its address"
    if isinstance(error, ConnectionRefusedError):
        return "node-missing", "start node rank 0"
    if isinstance(error, TimeoutError):
        return "port-blocked", "open the port in the firewall"
    return "host-unreachable", "check that the machine is up"
