"""How nodes meet: one waits for the others, and each pair tests its link (no torch).

The nodes meet at the master's port during the preflight, and their agents meet there afterwards. If
node rank 0 is lost, the remaining agents meet at the failover port of its successor. Nodes that are
started by hand have no preflight, so their agents test the pairs.
"""

import contextlib
import fcntl
import math
import socket
import termios
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from distributed.errors import Refused
from launcher import own_time
from launcher.handshake import Acceptor
from launcher.master_port import open_port
from launcher.text import Say, name_numbers
from launcher.wire import limits
from launcher.wire.messages import Fault, Faults, Member, NodeReport, PairResult, PairTest, Refusal
from launcher.wire.node_link import Link

MOST_TRIED = 64  # members by each one, all at the same time
PASSED = 1 << 16  # bytes sent to each member; they fill the largest packets of any interface
SHOWN = 3  # nodes named in one line
CURES = {
    "port-blocked": "open all ports between the nodes, for gloo and NCCL",
    "mtu-too-large": "lower the MTU of their interfaces, or let ICMP pass between them",
}


class Wait:
    """A wait for other nodes, with a limit. It begins when this is made."""

    def __init__(self, timeout_s: float, say: Say = lambda text: None) -> None:
        self.timeout_s = timeout_s
        self.say = say
        self.deadline = own_time.now() + timeout_s
        self._tell_at = time.monotonic() + limits.CHECKIN_TELL_S

    @property
    def left_s(self) -> float:
        """The seconds until the deadline; negative after it."""
        return self.deadline - own_time.now()

    def report_missing(self, node_ranks: Iterable[int], where: str = "") -> None:
        """Report which nodes are missing, once, after CHECKIN_TELL_S; `where` ends the line."""
        if time.monotonic() > self._tell_at:
            nodes = name_numbers(sorted(node_ranks))
            self.say(f"waiting up to {self.timeout_s:g} s for node rank {nodes}{where}")
            self._tell_at = math.inf


def gather(
    acceptor: Acceptor,
    awaited: set[int],
    wait: Wait,
    admit: Callable[[Link, NodeReport], bool] = lambda link, report: True,
) -> dict[Member, Link]:
    """Wait for nodes. Returns those that arrive in time, in order of node id, with open links.

    Closes the link of a node that is not awaited, or that `admit` rejects. Raises Refused if a node
    reports that the run cannot start.
    """
    here = dict[Member, Link]()
    missing = {*awaited}
    while missing and wait.left_s > 0:
        wait.report_missing(missing)
        for connection, received in acceptor.wait(min(wait.left_s, limits.CHECKIN_AGAIN_S)):
            link = Link(connection, received)
            report = _receive_report(link, missing, wait.deadline)
            if report and admit(link, report) and report.node_rank in missing:
                node_id = report.node_rank
                missing.remove(node_id)
                address = address_of(connection.getpeername)
                port = report.failover_port
                here[Member(node_id, report.host, report.nproc, address, port)] = link
            else:
                link.close()
    return {member: here[member] for member in sorted(here, key=lambda each: each.node_id)}


def _receive_report(link: Link, missing: set[int], deadline: float) -> NodeReport | None:
    """Return a node's report; None if the other end is none of the run's nodes.

    A node without a node rank gets the lowest missing one. Raises Refused if it reports that the
    run cannot start.
    """
    report = link.wait(deadline)
    if isinstance(report, Refusal):
        raise Refused(report.fault, report.message)
    if not isinstance(report, NodeReport):
        return None
    if report.node_rank >= 0:
        return report
    return replace(report, node_rank=min(missing, default=0))  # node rank 0 is never missing


def address_of(end: Callable[[], Any]) -> str:
    """Return the address of one end of a connection; "" if the node is already gone."""
    with contextlib.suppress(OSError):
        return str(end()[0]).removeprefix("::ffff:")
    return ""


def introduce(link: Link, me: NodeReport) -> socket.socket:
    """Introduce this node to the other end. Returns the open listener of its failover port."""
    listener = open_failover_port(str(link.socket.getsockname()[0]))
    link.send(replace(me, failover_port=listener.getsockname()[1]))
    return listener


def open_failover_port(address: str) -> socket.socket:
    """Listen for test data from other nodes; the kernel receives it, and nobody reads it."""
    listener = open_port(0, address)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * PASSED)
    return listener


# --- each pair of nodes tests its link --------------------------------------------------------


def try_pairs(
    first: Member,
    here: Mapping[Member, Link],
    within_s: float,
    more_s: float,  # extra time for answers
    file: str = "",
) -> list[tuple[int, Fault]]:
    """On node rank 0, have each pair of nodes test its link. Returns the faults, with node ids.

    `first` is node rank 0, `here` the others with their links; `file` is for them to look for (see
    PairTest). Waits for about `within_s + more_s` seconds at most; a node that does not answer has
    no fault. In a large run, each node tests only its neighbours: a port where nobody accepts has
    room for 128 connections in older kernels. If `within_s` is 0, the others try only node rank 0.
    """
    until = own_time.now() + within_s
    with open_failover_port(first.address) as listener:
        first = replace(first, failover_port=listener.getsockname()[1])
        others = [*here] if within_s > 0 else []

        for member, link in here.items():
            # The master's address may lead here through a service that forwards only its port.
            own = replace(first, address=address_of(link.socket.getsockname))
            link.send(PairTest(neighbours([own, *others], member.node_id), file))

        nearest = neighbours([first, *others], first.node_id)
        found = [(first.node_id, fault) for fault in try_members(nearest, first.node_id, within_s)]
        for member, link in here.items():
            answer = link.wait(until + more_s)
            if isinstance(answer, PairResult):
                found += [(member.node_id, fault) for fault in answer.faults]
    return found


def neighbours(members: Sequence[Member], node_id: int) -> Sequence[Member]:
    """Return the members that a node tries: the next ones, MOST_TRIED at most, itself last.

    `members` are sorted by node id; the first follows the last.
    """
    # Each half keeps its order: first those after the node, then those before it.
    return sorted(members, key=lambda member: member.node_id <= node_id)[:MOST_TRIED]


def try_members(members: Sequence[Member], me: int, within_s: float) -> Faults:
    """Send test data to the other members, in this order. Yields one fault for each reason.

    Skips members without a failover port. Waits for about `within_s` seconds at most.
    """
    deadline = time.monotonic() + within_s
    others = [member for member in members if member.node_id != me and member.failover_port]
    failed = dict[tuple[str, str], list[str]]()  # by fault and reason
    with ThreadPoolExecutor(MOST_TRIED) as pool:
        found = pool.map(lambda other: _try_member(other, deadline), others)
        for other, reason in zip(others, found, strict=True):
            if reason:
                failed.setdefault(reason, []).append(str(other))
    for (fault, why), names in failed.items():
        yield Fault(fault, f"cannot reach {shorten(names)} ({why})", CURES[fault])


def shorten(names: Sequence[str]) -> str:
    """Return the first SHOWN names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _try_member(other: Member, deadline: float) -> tuple[str, str] | None:
    """Send test data to a member. Returns the fault and why the data does not arrive, or None.

    Immediate errors are retried, because a network that has just recovered has no route at first.
    """
    end = min(time.monotonic() + limits.GREETING_S, deadline + 1)
    why = ""

    while (left_s := end - time.monotonic()) > 0:
        try:
            where = other.address, other.failover_port
            with socket.create_connection(where, left_s) as connection:
                connection.settimeout(max(left_s, limits.PAIR_PASS_S))
                with contextlib.suppress(TimeoutError):  # find_loss() tells why
                    connection.sendall(bytes(PASSED))
                pass_s = max(end - time.monotonic(), limits.PAIR_PASS_S)
                loss = find_loss(connection, pass_s)
                return ("mtu-too-large", loss) if loss else None
        except TimeoutError:
            why = why or f"no answer in {limits.GREETING_S:.0f} s"
            break
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(min(limits.PAIR_AGAIN_S, left_s))
    return ("port-blocked", why) if why else None


def find_loss(connection: socket.socket, within_s: float) -> str:
    """Wait until the other end's kernel has all data. Returns why it has not; "" if it has."""
    for _ in own_time.turns(within_s):
        if not is_busy(connection):
            return ""
    size = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    return f"it answers, but packets of {size} bytes are lost"


def is_busy(connection: socket.socket) -> bool:
    """Return whether the other end is still there, and has not yet received all that was sent."""
    with contextlib.suppress(OSError):  # a sandbox's kernel may not support it
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) != b"\x07":  # TCP_CLOSE
            return any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))  # SIOCOUTQ, tcp(7)
    return False
