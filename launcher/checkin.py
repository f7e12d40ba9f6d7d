"""The agents' meeting at node rank 0, before any rank starts (no torch)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from distributed.errors import Refused
from launcher.identity import NodeReport, mismatches
from launcher.link import SILENCE_S, Peer

WELCOME_S = 3.0  # for an agent to greet another; torch's store, served there later, does not
TELL_S = 3.0  # a wait that takes longer says what it waits for
SKEW_S = 5.0  # a larger difference between clocks is reported
_RETRY_S = 0.1


@dataclass(frozen=True)
class Assignment:
    """An agent's part in the run, as node rank 0 gives it."""

    run_id: str
    first_rank: int
    world_size: int
    hosts: list[str]


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
        cure = "set MASTER_PORT to a free one"
        raise Refused(
            "port-in-use", f"port {port} on {address}: {error.strerror}; {cure}"
        ) from error


def open_port(port: int) -> socket.socket:
    """Listen on the port (0: any free one) at every address of this machine; raises OSError."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=4096)


def gather(
    listener: socket.socket, me: NodeReport, timeout_s: float, say: Callable[[str], None]
) -> tuple[dict[int, Peer], Assignment]:
    """On node rank 0: wait until every other agent has checked in, and start them.

    Returns the others by node rank, and the place of this node.

    Raises:
        Refused: a node did not come, came twice, or does not match this one; all are told.
    """
    start = time.monotonic()
    deadline = start + timeout_s
    is_told = False
    nodes: dict[int, NodeReport] = {me.node_rank: me}
    peers: dict[int, Peer] = {}
    strangers: list[Peer] = []
    try:
        while len(nodes) < me.num_nodes:
            limit = deadline if is_told else min(deadline, start + TELL_S)
            listener.settimeout(max(0.0, limit - time.monotonic()))
            try:
                peer = Peer(listener.accept()[0])
            except (TimeoutError, BlockingIOError):
                missing = ", ".join(str(one) for one in range(me.num_nodes) if one not in nodes)
                if time.monotonic() < deadline:
                    say(f"waiting for node rank {missing}, {timeout_s:g} s at most")
                    is_told = True
                    continue
                here = ", ".join(f"{node.node_rank} ({node.host})" for node in nodes.values())
                raise Refused(
                    "node-missing",
                    f"node rank {missing} did not check in within {timeout_s:g} s"
                    f" (here: {here}); start it, or look at its terminal",
                ) from None
            hello = peer.wait(min(deadline, time.monotonic() + 3))
            try:
                node = NodeReport(**hello["node"])  # type: ignore[index]
            except (TypeError, KeyError):
                peer.close()  # a port scan, or a health check
                continue
            peer.send("welcome")
            strangers.append(peer)
            _compare(me, node, nodes)
            skew = node.time - time.time()
            if abs(skew) > SKEW_S:
                say(f"warning: {node.host}'s clock is {skew:+.0f} s from {me.host}'s [clock-skew]")
            nodes[node.node_rank] = node
            peers[node.node_rank] = strangers.pop()
    except Refused as refused:
        for peer in [*peers.values(), *strangers]:
            peer.send("refused", fault=refused.fault, message=str(refused).rpartition(" [")[0])
        raise
    first_rank = 0
    assignments = {}
    for rank in sorted(nodes):
        assignments[rank] = Assignment(
            run_id=me.run_id,
            first_rank=first_rank,
            world_size=sum(node.nproc for node in nodes.values()),
            hosts=[nodes[rank].host for rank in sorted(nodes)],
        )
        first_rank += nodes[rank].nproc
    for rank, peer in peers.items():
        peer.send("start", assignment=asdict(assignments[rank]))
    return peers, assignments[me.node_rank]


def _compare(me: NodeReport, node: NodeReport, nodes: Mapping[int, NodeReport]) -> None:
    if node.num_nodes != me.num_nodes or not 0 < node.node_rank < me.num_nodes:
        raise Refused(
            "wrong-world",
            f"{node.host} says node rank {node.node_rank} of {node.num_nodes}, {me.host} says"
            f" {me.num_nodes} nodes; give every node the same number",
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
            " leave RUN_ID away, or give the same one",
        )
    for fault, cause in mismatches(me, node):
        raise Refused(fault, f"{cause}; make them the same")


def join(
    address: str, port: int, me: NodeReport, timeout_s: float, say: Callable[[str], None]
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
            peer.send("hello", node=asdict(me))
            answer = peer.wait(min(deadline, time.monotonic() + WELCOME_S))
            if answer is not None and answer["kind"] == "welcome":
                answer = peer.wait(deadline)
            if answer is not None and answer["kind"] == "refused":
                raise Refused(answer["fault"], answer["message"])
            if answer is not None:
                return peer, Assignment(**answer["assignment"])
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


def _explain(error: OSError) -> tuple[str, str]:
    """The fault behind a connection that failed, and its cure."""
    if isinstance(error, socket.gaierror):
        return "name-unresolved", "correct the master's name, or give its address"
    if isinstance(error, ConnectionRefusedError):
        return "node-missing", "start node rank 0"
    if isinstance(error, TimeoutError):
        return "port-blocked", "open the port in the firewall"
    return "host-unreachable", "see that the machine is up"
