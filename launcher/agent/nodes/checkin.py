"""The agents' meeting at node rank 0, before any rank starts (no torch)."""

import contextlib
import errno
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distributed.errors import Refused
from launcher import own_time
from launcher.agent.nodes.team import Team
from launcher.agent.output.stream import say
from launcher.handshake import Acceptor, Access, NotAccepted, WrongSecret, connect
from launcher.master_port import open_port
from launcher.preflight.must_match import ARGUMENTS, mismatches
from launcher.text import MANY, count, fold_names, name_numbers
from launcher.wire import limits, meeting
from launcher.wire.meeting import CURES, Wait, find_loss, shorten
from launcher.wire.messages import (
    Assignment,
    Member,
    NodeReport,
    PairResult,
    PairTest,
    Refusal,
)
from launcher.wire.node_link import Link, Peers


@dataclass(frozen=True)
class Meeting:
    """The outcome of check-in, for one node's agent."""

    assignment: Assignment
    listener: socket.socket | None = None  # on node rank 0: where the agents met
    team: Team | None = None  # on node rank 0
    links: Peers = field(default_factory=dict)  # elsewhere: the link to node rank 0
    failover: socket.socket | None = None  # elsewhere: this agent's failover port
    took_over: Sequence[str] = ()  # replacements, if this agent just became node rank 0

    @property
    def peers(self) -> Peers:
        """The links by node rank: on node rank 0 to all others, elsewhere to node rank 0."""
        return self.team.peers if self.team else self.links

    def spares(self) -> Sequence[Link]:
        """Return the links to the spares, on node rank 0."""
        return () if self.team is None else [*self.team.spares.values()]

    def everyone(self) -> Sequence[Link]:
        """Return the links to all other agents, including spares."""
        return [*self.peers.values(), *self.spares()]

    def keep(self, peers: Peers) -> "Meeting":
        """Return the meeting after an attempt, which hands back the links that it has not lost."""
        if self.team is None:
            return replace(self, links=peers)
        self.team.part_with(self.team.peers.keys() - peers.keys())
        return self

    @contextlib.contextmanager
    def starting_others(self) -> Iterator[None]:
        """On node rank 0, send the others their assignments after the body, so that they start.

        If the body raises Refused, send them the reason instead. Raises it again.
        """
        try:
            yield
        except Refused as refused:
            if self.team:
                refuse(self.everyone(), refused)
            raise
        if self.team:
            own = self.assignment
            self.team.send_assignments(self.team.assign(own.attempt, own.address, own.port))


def meet(
    address: str,
    port: int,
    me: NodeReport,
    access: Access,
    timeout_s: float,
    *,
    num_spares: int = 0,  # among the agents that meet
    min_nodes: int = 0,
    is_by_hand: bool = False,  # no launcher has started the nodes, or would end them
    tries_pairs: bool = False,  # have each pair of nodes test its link, as a preflight would
) -> Meeting:
    """Meet the other nodes' agents at node rank 0. Raises Refused if the run cannot start.

    Node rank 0 waits for all others, for up to `timeout_s`; every other agent checks in with it,
    and waits for the run to start.
    """
    wait = Wait(timeout_s, say)
    if me.node_rank != 0:
        return check_in_until(address, port, me, access.secret, wait)

    listener = listen(address, port, is_alone=me.num_nodes == 1)
    with contextlib.closing(Acceptor(listener, access, say)) as acceptor:
        here = gather(acceptor, me, wait, tells_late=is_by_hand)
    members = [Member(0, me.host, me.nproc, address), *here]
    peers = {member.node_id: peer for member, peer in here.items()}
    if tries_pairs and here:
        within_s = limits.for_nodes(limits.PAIRS_S, len(members))
        losses = meeting.try_pairs(members[0], here, within_s, more_s=within_s)
        if losses:
            causes = [f"{members[node_id].host}: {fault.cause}" for node_id, fault in losses]
            _, first = losses[0]
            refused = Refused(first.name, f"{shorten(causes)}; {first.cure}")
            refuse(peers.values(), refused)
            raise refused

    spares = {}
    for member in members[len(members) - num_spares :]:  # the last ones wait as spares
        spares[member] = peers.pop(member.node_id)
    team = Team(me.run_id, members[: 1 + len(peers)], peers, spares, min_nodes)
    return Meeting(team.assign()[me.node_rank], listener, team)


def listen(address: str, port: int, *, is_alone: bool = False) -> socket.socket:
    """Listen on the master port; 0 means any free one. Raises Refused if that fails.

    If it is taken, a node that is alone takes another, and prints that: the port that the preflight
    found free may have been taken since then.
    """
    try:
        return open_port(port, address)
    except OSError as error:
        if is_alone and error.errno == errno.EADDRINUSE:
            say(f"port {port} is taken; the ranks use another, which no other node has to know")
            return open_port(0, address)
        raise Refused(
            "port-in-use",
            f"port {port} on {address}: {error.strerror}; "
            "stop the other copy of this run, if there is one, or set MASTER_PORT to a free port",
        ) from error


def gather(
    acceptor: Acceptor, me: NodeReport, wait: Wait, *, tells_late: bool = False
) -> dict[Member, Link]:
    """On node rank 0, wait until every other agent has checked in. Returns them, with their links.

    Raises Refused, after rejecting the nodes that have checked in, if a node is missing,
    checked in twice, or does not match this one. With `tells_late`, first waits CHECKIN_LATE_S for
    the others, and rejects them as well. A node of another run is turned away.
    """
    nodes: dict[int, NodeReport] = {me.node_rank: me}
    awaited = {*range(me.num_nodes)} - {me.node_rank}
    newcomers = list[tuple[int, Link]]()  # they have checked in, but may still be rejected

    def admit(peer: Link, node: NodeReport) -> bool:
        """Add a node to `nodes`. Returns False to turn one of another run away, with a warning.

        Also warns if its clock differs from this one's by more than SKEW_S. Raises Refused, which
        ends this run, if it does not match; `newcomers` then has its link.
        """
        if node.run_id not in ("", me.run_id):
            cause = f"{node.host} has run id {node.run_id}, but {me.host} has {me.run_id}"
            say(f"warning: {cause}; rejected; still waiting for this run's nodes [wrong-world]")
            peer.send(
                Refusal("wrong-world", f"{cause}; do not set RUN_ID, or set one for all nodes")
            )
            return False
        newcomers.append((node.node_rank, peer))
        _refuse_mismatch(me, node, nodes)
        skew = node.time - time.time()
        if abs(skew) > limits.SKEW_S:
            say(
                f"warning: {node.host}'s clock and {me.host}'s differ by {skew:+.0f} s [clock-skew]"
            )
        nodes[node.node_rank] = node
        return True

    try:
        here = meeting.gather(acceptor, awaited, wait, admit)
        if missing := awaited - {member.node_id for member in here}:
            came = ", ".join(f"{node.node_rank} ({node.host})" for node in nodes.values())
            if len(nodes) > MANY:
                hosts = [node.host for _, node in sorted(nodes.items())]
                came = f"{name_numbers(sorted(nodes))}, {', '.join(fold_names(hosts))}"
            if number := acceptor.unauthenticated:
                came += f"; dropped {count(number, 'connection')} without the run's secret"
            raise Refused(
                "node-missing",
                f"node rank {name_numbers(sorted(missing))} did not check in within "
                f"{wait.timeout_s:g} s (here: {came}); start it, or look at its terminal",
            )
    except Refused as refused:
        refuse((peer for _, peer in newcomers), refused)
        late = awaited - {rank for rank, _ in newcomers}
        if tells_late and late and wait.left_s > 0:
            tell_late(acceptor, late, refused)
        raise
    return here


def tell_late(acceptor: Acceptor, late: set[int], refused: Refused) -> None:
    """Wait up to CHECKIN_LATE_S for agents that come later, and reject them.

    Otherwise, they would wait for node rank 0 until their timeout.
    """
    say(f"{refused}; telling it for {limits.CHECKIN_LATE_S:g} s to nodes that come later")

    def admit(peer: Link, node: NodeReport) -> bool:
        refuse([peer], refused)
        return True

    meeting.gather(acceptor, late, Wait(limits.CHECKIN_LATE_S), admit)


def refuse(peers: Iterable[Link], refused: Refused) -> None:
    """Notify agents that the run will not start, or will continue without them."""
    for peer in peers:
        peer.send(Refusal(refused.fault, refused.message))


def _refuse_mismatch(me: NodeReport, node: NodeReport, nodes: Mapping[int, NodeReport]) -> None:
    """Raise Refused if a node that has checked in cannot be part of this run."""
    if node.num_nodes != me.num_nodes or node.node_rank >= me.num_nodes:
        raise Refused(
            "wrong-world",
            f"{node.host} was started as node rank {node.node_rank} of {node.num_nodes} nodes, "
            f"but {me.host} as node rank 0 of {me.num_nodes}; "
            "give every node the same number of nodes",
        )
    if twice := nodes.get(node.node_rank):
        cause = f"node rank {node.node_rank} was started twice, on {twice.host} and on {node.host}"
        raise Refused("duplicate-node-rank", f"{cause}; give each node its own rank")
    for fault, cause in mismatches(me, node):
        cure = "make them the same"
        if cause.startswith(ARGUMENTS):
            cure += ", or set SKIP_PREFLIGHT=1 on every node"
        raise Refused(fault, f"{cause}; {cure}")


def check_in_until(address: str, port: int, me: NodeReport, secret: bytes, wait: Wait) -> Meeting:
    """Check in with node rank 0, from another node, and wait for the run to start.

    Tries again until `wait` ends, or for CHECKIN_REJECTED_S if the other end turns this node away.
    Raises Refused if node rank 0 cannot be reached in time, or rejects this node or the run.
    """
    at = f"{address}:{port}"
    last: OSError = TimeoutError("no answer")
    turned_away_at: float | None = None  # the first time

    while wait.left_s > 0:
        try:
            return check_in(address, port, me, secret, wait)
        except (NotAccepted, WrongSecret) as error:
            if isinstance(error, WrongSecret) and not turned_away_at:
                say(f"warning: {at} has a different RUN_SECRET, or none [stranger]")
            last = error
            turned_away_at = turned_away_at or time.monotonic()
            if own_time.since(turned_away_at) > limits.CHECKIN_REJECTED_S:
                break
        except OSError as error:
            last = error
        wait.report_missing([0], f" at {at}")
        time.sleep(limits.CHECKIN_AGAIN_S)
    raise _describe_failure(last, at, me, wait)


def _describe_failure(last: OSError, at: str, me: NodeReport, wait: Wait) -> Refused:
    """Return why this node could not check in: `last` is what its last try ended with."""
    if isinstance(last, WrongSecret):
        cause = f"node rank 0 at {at} has a different RUN_SECRET from this node, or none"
        return Refused("stranger", f"{cause}; set the same one on every node")
    if isinstance(last.__cause__, TimeoutError):  # connected, but without an answer
        # torch's store, which has the port once the run has started, is as silent.
        cause = f"{at} does not answer: another program has it, or the run has started"
        cure = "look at node rank 0's terminal, or set MASTER_PORT to a free port"
        return Refused("port-in-use", f"{cause}; {cure}")
    if isinstance(last, NotAccepted):
        which = f"node rank {me.node_rank}" if me.node_rank >= 0 else "this node"
        why = "the run has already started, or the port is another program's"
        cure = "check node rank 0's terminal, and whether this node was also started elsewhere"
        return Refused("duplicate-node-rank", f"{at} rejected {which}: {why}; {cure}")

    fault, cure = _find_fault(last)
    cause = f"node rank 0 at {at} did not answer within {wait.timeout_s:g} s"
    return Refused(fault, f"{cause} ({last.strerror or last}); {cure}")


def check_in(
    address: str,
    port: int,
    me: NodeReport,
    secret: bytes,
    wait: Wait,
    *,
    connect_s: float = limits.CHECKIN_CONNECT_S,
) -> Meeting:
    """Connect to node rank 0, introduce this node, and wait for the run to start.

    Meanwhile, test the links to other nodes if node rank 0 asks for it. If large packets are lost,
    tell node rank 0 on a new connection. Opens this agent's failover port, and keeps it if the run
    can replace nodes. Raises OSError if node rank 0 cannot be reached, has another secret
    (WrongSecret) or is gone (NotAccepted); Refused if the run will not start, or without this node.
    """
    peer = Link(connect(address, port, secret, min(connect_s, wait.timeout_s)))
    failover = meeting.introduce(peer, replace(me, time=time.time()))  # `me` may be minutes old

    if why := find_loss(peer.socket, limits.CHECKIN_PASS_S):
        peer.close()
        cause = f"{me.host}: cannot reach node rank 0 at {address}:{port} ({why})"
        lost = Refused("mtu-too-large", f"{cause}; {CURES['mtu-too-large']}")
        with contextlib.suppress(OSError):
            refuse([Link(connect(address, port, secret, limits.CHECKIN_CONNECT_S))], lost)
        raise lost

    # Node rank 0 may have started later, so its limit may expire later.
    limit_s = wait.timeout_s + limits.CHECKIN_TELL_S
    while isinstance(answer := peer.wait(own_time.now() + limit_s), PairTest):
        peer.send(PairResult([*meeting.try_members(answer.members, me.node_rank, limits.PAIRS_S)]))

    if isinstance(answer, Assignment):
        if me.attempt or not answer.members:  # this agent already has one, or needs none
            failover.close()
        return Meeting(answer, links={0: peer}, failover=failover)
    failover.close()
    peer.close()
    if isinstance(answer, Refusal):
        raise Refused(answer.fault, answer.message)
    raise NotAccepted("node rank 0 has gone")


def _find_fault(error: OSError) -> tuple[str, str]:
    """Return the name of the fault behind a failed connection, and how to fix it."""
    if isinstance(error, socket.gaierror):
        return "name-unresolved", "correct the master's name, or give its address"
    if isinstance(error, ConnectionRefusedError):
        return "node-missing", "start node rank 0"
    if isinstance(error, TimeoutError):
        return "port-blocked", "open the port in the firewall"
    return "host-unreachable", "check that the machine is up"
