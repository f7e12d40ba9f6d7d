"""The agents' meeting at node rank 0, before any rank starts (no torch)."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distributed.errors import Refused
from launcher import own_time
from launcher.agent.assignment import Assignment, Seat
from launcher.agent.nodes.protocol import Peer, Refusal
from launcher.agent.nodes.team import Team
from launcher.agent.output.stream import say
from launcher.failure import Failure
from launcher.handshake import Access, Entrance, NoEntrance, WrongSecret, connect, open_port
from launcher.preflight.meeting import (
    CURES,
    Door,
    Doors,
    Tried,
    find_loss,
    open_door,
    shorten,
    try_doors,
)
from launcher.preflight.must_match import ARGUMENTS, NodeReport, mismatches
from launcher.text import count
from launcher.wire import limits


@dataclass(frozen=True)
class Meeting:
    """The outcome of check-in, for one node's agent."""

    assignment: Assignment
    peers: dict[int, Peer]  # on node rank 0 every other agent by node rank, else node rank 0's
    listener: socket.socket | None = None  # on node rank 0: where the agents met
    team: Team | None = None  # there
    door: socket.socket | None = None  # elsewhere: where this agent can take its place
    lost: Failure | None = None  # the loss of node rank 0, where this agent has taken it
    told: Sequence[str] = ()  # who took over then

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """On node rank 0, start the others after the body; where it raises Refused, refuse them."""
        try:
            yield
        except Refused as refused:
            if self.team is not None:
                refuse([*self.team.peers.values(), *self.team.spares.values()], refused)
            raise
        if self.team is not None:
            part = self.assignment
            self.team.tell(self.team.assign(part.attempt, part.address, part.port))


class Wait:
    """A wait with a limit. After TELL_S it says once what it waits for."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.deadline = own_time.now() + timeout_s
        self._tell_at = time.monotonic() + limits.CHECKIN_TELL_S

    @property
    def left_s(self) -> float:
        return self.deadline - own_time.now()

    def tell(self, what: str) -> None:
        """Say what is waited for, if it is time to."""
        if time.monotonic() > self._tell_at:
            say(f"waiting for {what}, {self.timeout_s:g} s at most")
            self._tell_at = math.inf


def meet(
    address: str,
    port: int,
    me: NodeReport,
    access: Access,
    timeout_s: float,
    *,
    num_spares: int = 0,  # of the agents that meet
    min_nodes: int = 0,
    tries_pairs: bool = False,  # of nodes: no preflight has done so
) -> Meeting:
    """Meet the other nodes' agents at node rank 0; raises Refused where the run cannot start."""
    if me.node_rank != 0:
        has_door = min_nodes > 0 or tries_pairs
        return join(address, port, me, access.secret, Wait(timeout_s), has_door=has_door)
    listener = listen(address, port)
    with contextlib.closing(Entrance(listener, access, say)) as entrance:
        peers, reports = gather(entrance, me, Wait(timeout_s))
    everyone = [seat_of(reports[place], peers.get(place)) for place in sorted(reports)]
    if tries_pairs and peers:
        try_pairs(address, everyone, peers)
    seats, waiting = everyone[: len(everyone) - num_spares], everyone[len(everyone) - num_spares :]
    spares = {seat.place: peers.pop(seat.place) for seat in waiting}
    team = Team(me.run_id, seats, peers, {seat.place: seat for seat in waiting}, spares, min_nodes)
    return Meeting(team.assign()[me.node_rank], peers, listener, team)


def seat_of(report: NodeReport, peer: Peer | None) -> Seat:
    """Return the seat of an agent that has come."""
    address = ""
    if peer is not None and report.door:
        with contextlib.suppress(OSError):  # it has gone already
            address = str(peer.socket.getpeername()[0])
    return Seat(report.node_rank, report.host, report.nproc, address, report.door)


def listen(address: str, port: int) -> socket.socket:
    """Listen on the master port (0: any free one); raises Refused where it is taken."""
    try:
        return open_port(port, address)
    except OSError as error:
        cause = f"port {port} on {address}: {error.strerror}"
        raise Refused("port-in-use", f"{cause}; set MASTER_PORT to a free one") from error


def gather(
    entrance: Entrance, me: NodeReport, wait: Wait
) -> tuple[dict[int, Peer], dict[int, NodeReport]]:
    """On node rank 0: wait until every other agent has checked in.

    Returns the others, and what every agent says of itself, by node rank. Raises Refused where a
    node did not come, came twice, or does not match this one; all are told.
    """
    nodes: dict[int, NodeReport] = {me.node_rank: me}
    peers: dict[int, Peer] = {}
    newcomers: list[Peer] = []  # they have checked in, and may yet be refused
    try:
        while len(nodes) < me.num_nodes:
            for peer, node in _let_in(entrance, nodes, wait):
                newcomers.append(peer)
                if node.node_rank < 0:
                    free = {*range(me.num_nodes)} - {*nodes}
                    node = replace(node, node_rank=min(free, default=0))
                _compare(me, node, nodes)
                skew = node.time - time.time()
                if abs(skew) > limits.SKEW_S:
                    differs = f"{node.host}'s clock is {skew:+.0f} s from {me.host}'s"
                    say(f"warning: {differs} [clock-skew]")
                nodes[node.node_rank] = node
                peers[node.node_rank] = peer
    except Refused as refused:
        refuse(newcomers, refused)
        raise
    return peers, nodes


def try_pairs(address: str, everyone: Sequence[Seat], peers: Mapping[int, Peer]) -> None:
    """On node rank 0: have every two nodes pass something; refuses the start where it is lost."""
    me, *others = everyone
    doors = [Door(seat.place, seat.host, seat.address, seat.door) for seat in others if seat.door]
    with open_door(address) as own:
        doors.append(Door(0, me.host, address, own.getsockname()[1]))
        for peer in peers.values():
            peer.send(Doors(doors))
        until = own_time.now() + 2 * limits.PAIRS_S
        faults = [(me, fault) for fault in try_doors(doors, 0, time.monotonic() + limits.PAIRS_S)]
        for seat in others:
            answer = peers[seat.place].wait(until)
            faults += [(seat, one) for one in answer.faults] if isinstance(answer, Tried) else []
    if faults:
        causes = [f"{seat.host}: {fault.cause}" for seat, fault in faults]
        _, first = faults[0]
        refused = Refused(first.name, f"{shorten(causes)}; {first.cure}")
        refuse(peers.values(), refused)
        raise refused


def refuse(peers: Iterable[Peer], refused: Refused) -> None:
    """Tell agents that the run does not start, or does not go on with them."""
    for peer in peers:
        peer.send(Refusal(refused.fault, refused.message))


def _let_in(
    entrance: Entrance, nodes: Mapping[int, NodeReport], wait: Wait
) -> Iterator[tuple[Peer, NodeReport]]:
    """Wait a little, and yield the agents that come."""
    missing = ", ".join(str(rank) for rank in range(nodes[0].num_nodes) if rank not in nodes)
    if wait.left_s <= 0:
        here = ", ".join(f"{node.node_rank} ({node.host})" for node in nodes.values())
        strangers = count(entrance.strangers, "connection")
        dropped = f"; {strangers} without the run's secret dropped" if entrance.strangers else ""
        cause = f"node rank {missing} did not check in within {wait.timeout_s:g} s (here: {here}"
        cure = "start it, or look at its terminal"
        raise Refused("node-missing", f"{cause}{dropped}); {cure}")
    wait.tell(f"node rank {missing}")
    for connection, received in entrance.wait(min(wait.left_s, limits.CHECKIN_AGAIN_S)):
        peer = Peer(connection, received)
        if isinstance(node := peer.wait(wait.deadline), NodeReport):
            yield peer, node
            continue
        peer.close()
        if isinstance(node, Refusal):
            raise Refused(node.fault, node.message)


def _compare(me: NodeReport, node: NodeReport, nodes: Mapping[int, NodeReport]) -> None:
    """Raise Refused where a node that has come cannot be part of this run."""
    if node.num_nodes != me.num_nodes or not 0 <= node.node_rank < me.num_nodes:
        cause = f"{node.host} was started as node {node.node_rank} of {node.num_nodes}"
        cause += f", {me.host} as node 0 of {me.num_nodes}"
        raise Refused("wrong-world", f"{cause}; give every node the same number")
    if twice := nodes.get(node.node_rank):
        cause = f"node rank {node.node_rank} was started twice, on {twice.host} and on {node.host}"
        raise Refused("duplicate-node-rank", f"{cause}; give each node its own")
    if node.run_id not in ("", me.run_id):
        cause = f"{node.host} has run id {node.run_id}, {me.host} has {me.run_id}"
        raise Refused("wrong-world", f"{cause}; do not set RUN_ID, or set the same one")
    for fault, cause in mismatches(me, node):
        cure = ", or set SKIP_PREFLIGHT=1 on every node" * cause.startswith(ARGUMENTS)
        raise Refused(fault, f"{cause}; make them the same{cure}")


def join(
    address: str, port: int, me: NodeReport, secret: bytes, wait: Wait, *, has_door: bool = False
) -> Meeting:
    """On any other node: check in with node rank 0, and wait for the start.

    Raises Refused where node rank 0 cannot be reached in time, or refuses this node or the run.
    """
    last: OSError = TimeoutError("no answer")
    turned_away: float | None = None  # since when
    while wait.left_s > 0:
        try:
            return _check_in(address, port, me, secret, wait, has_door=has_door)
        except (NoEntrance, WrongSecret) as error:
            if isinstance(error, WrongSecret) and turned_away is None:
                say(f"warning: {address}:{port} has another RUN_SECRET, or none [stranger]")
            last, turned_away = error, turned_away or time.monotonic()
            if own_time.since(turned_away) > limits.SILENCE_S:
                break
        except OSError as error:
            last = error
        wait.tell(f"node rank 0 at {address}:{port}")
        time.sleep(limits.CHECKIN_AGAIN_S)
    if isinstance(last, WrongSecret):
        cause = f"node rank 0 at {address}:{port} has another RUN_SECRET than this node, or none"
        raise Refused("stranger", f"{cause}; set the same one on every node")
    if isinstance(last, NoEntrance):
        which = f"node rank {me.node_rank}" if me.node_rank >= 0 else "more nodes"
        cause = f"{address}:{port} takes no {which}: its run has begun"
        cure = "see whether this node was started elsewhere too"
        raise Refused("duplicate-node-rank", f"{cause}; {cure}")
    fault, cure = _explain(last)
    cause = f"node rank 0 at {address}:{port} did not answer within {wait.timeout_s:g} s"
    raise Refused(fault, f"{cause} ({last.strerror or last}); {cure}")


def _check_in(
    address: str, port: int, me: NodeReport, secret: bytes, wait: Wait, *, has_door: bool
) -> Meeting:
    """Connect, and wait for the start; raises OSError, or Refused."""
    peer = Peer(connect(address, port, secret, min(limits.CHECKIN_CONNECT_S, wait.timeout_s)))
    door = open_door(str(peer.socket.getsockname()[0])) if has_door else None
    peer.send(replace(me, door=door.getsockname()[1]) if door else me)
    if why := find_loss(peer.socket, limits.SILENCE_S):
        peer.close()
        cause = f"{me.host}: no way to node rank 0 at {address}:{port} ({why})"
        lost = Refused("mtu-too-large", f"{cause}; {CURES['mtu-too-large']}")
        with contextlib.suppress(OSError):
            short = connect(address, port, secret, limits.CHECKIN_CONNECT_S)
            refuse([Peer(short)], lost)
        raise lost
    # Node rank 0 may have started later; it has its own limit.
    limit_s = wait.timeout_s + limits.CHECKIN_TELL_S
    answer = peer.wait(own_time.now() + limit_s)
    if isinstance(answer, Doors):
        faults = try_doors(answer.doors, me.node_rank, time.monotonic() + limits.PAIRS_S)
        peer.send(Tried([*faults]))
        answer = peer.wait(own_time.now() + limit_s)
    if door and not (isinstance(answer, Assignment) and answer.seats):
        door.close()
    if isinstance(answer, Assignment):
        return Meeting(answer, {0: peer}, door=door)
    peer.close()
    if isinstance(answer, Refusal):
        raise Refused(answer.fault, answer.message)
    raise NoEntrance("node rank 0 has gone")


def _explain(error: OSError) -> tuple[str, str]:
    """Return the fault behind a connection that failed, and its cure."""
    if isinstance(error, socket.gaierror):
        return "name-unresolved", "correct the master's name, or give its address"
    if isinstance(error, ConnectionRefusedError):
        return "node-missing", "start node rank 0"
    if isinstance(error, TimeoutError):
        return "port-blocked", "open the port in the firewall"
    return "host-unreachable", "check that the machine is up"
