"""During the checks, the nodes meet at the master's port to test clocks, links and a folder."""

import contextlib
import errno
import os
import socket
import tempfile
import time
from pathlib import Path

from launcher import own_time
from launcher.handshake import Acceptor, Access, NotAccepted, WrongSecret, connect
from launcher.preflight.checks import nearest_existing
from launcher.wire import limits, meeting
from launcher.wire.meeting import Wait
from launcher.wire.messages import Fault, Faults, Member, NodeReport, PairResult, PairTest
from launcher.wire.node_link import Link


def host_meeting(
    listener: socket.socket,
    me: Member,
    access: Access,
    num_others: int,
    folder: Path | None,
    wait: Wait,
) -> list[Fault]:
    """On node rank 0, meet `num_others` other nodes; if all arrive, have each pair test its link.

    If a `folder` is given, makes a temporary file there, for which the others look. Returns faults
    for the nodes that node rank 0 cannot reach. Closes the listener.
    """
    acceptor = Acceptor(listener, access, say=lambda text: None)  # the check-in reports it
    with listener, contextlib.closing(acceptor), contextlib.ExitStack() as stack:
        file = ""
        if folder:
            with contextlib.suppress(OSError):  # which check_folders reports
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile(dir=nearest_existing(folder), prefix=".shared-")
                ).name

        here = meeting.gather(acceptor, {*range(1, num_others + 1)}, wait)
        for link in here.values():
            stack.enter_context(contextlib.closing(link))
        left_s = wait.left_s if len(here) == num_others else 0
        faults = meeting.try_pairs(me, here, left_s, limits.PAIR_PASS_S, file)
    return [fault for node_id, fault in faults if node_id == me.node_id]  # others report theirs


def join_meeting(
    address: str, port: int, me: NodeReport, secret: bytes, wait: Wait
) -> tuple[list[Fault], list[str]]:
    """On another node, meet node rank 0: compare the clocks and the folder, and test the links.

    Returns the faults, and the names of the checks that were made. Both are empty if node rank 0,
    or another check here, reports why the nodes cannot meet.
    """
    try:
        master = Link(_reach(address, port, secret, wait))
    except OSError as error:
        return [*_explain_unreached(error, f"{address}:{port}")], []

    with contextlib.closing(master), meeting.introduce(master, me):
        test = master.wait(wait.deadline + 1)  # node rank 0 waits for others until the deadline
        if not isinstance(test, PairTest):
            return [], ["port"]

        done = ["port", "clock", "other port"]
        if test.file:
            done.append("folder")
        if len(test.members) > 1:
            done.append("pairs")
        differences = [*_compare_with_master(test)]
        unreached = [*meeting.try_members(test.members, me.node_rank, wait.left_s)]
        master.send(PairResult(unreached))
        master.wait(wait.deadline + 1)  # until all others have tried this node's port
        return [*differences, *unreached], done


def _explain_unreached(error: OSError, where: str) -> Faults:
    """Yield why node rank 0 cannot be reached, unless another check reports the reason."""
    # No answer to the connection, or none to the handshake, which raises NotAccepted from it.
    is_silent = isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)
    if isinstance(error, socket.gaierror):  # check_master reports it
        return
    if isinstance(error, NotAccepted | WrongSecret) and not is_silent:
        return  # another program has the port, which node rank 0 reports
    why = f"no answer in {limits.GREETING_S:g} s" if is_silent else error.strerror or error
    cause = f"cannot reach {where} ({why})"
    yield Fault("port-blocked", cause, "open the port in the firewall")


def _compare_with_master(test: PairTest) -> Faults:
    """Yield what differs between node rank 0 and this node."""
    skew = time.time() - test.time
    if abs(skew) > limits.SKEW_S:
        cause = f"the clock differs from node rank 0's by {skew:+.0f} s"
        yield Fault("clock-skew", cause, "synchronize both clocks", warns=True)
    if test.file and not os.path.exists(test.file):
        yield Fault(
            "dir-not-shared",
            f"{os.path.dirname(test.file)!r} is not the same folder as on node rank 0",
            "choose a checkpoint.dir that all nodes share: the job may restart elsewhere",
        )


def _reach(address: str, port: int, secret: bytes, wait: Wait) -> socket.socket:
    """Connect to node rank 0, which may open its port after this node first tries it.

    Raises OSError if it cannot be reached in time; WrongSecret and NotAccepted are among them.
    """
    soon = own_time.now() + limits.GREETING_S
    while True:
        try:
            return connect(address, port, secret, limits.GREETING_S)
        except OSError as error:
            if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET):  # the port is not open yet
                until = wait.deadline
            elif error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):  # a network comes back
                until = soon
            else:
                raise
            if own_time.now() > until:
                raise
            time.sleep(2 * limits.POLL_S)
