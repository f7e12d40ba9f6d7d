"""The nodes meet at the master's port: clocks, a shared folder, ports, and strangers."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from agents import PATIENCE_S
from ports import free_port

from launcher.handshake import Acceptor, Access
from launcher.master_port import open_port
from launcher.preflight import between_nodes
from launcher.typed_json import encode
from launcher.wire import meeting
from launcher.wire.meeting import Wait
from launcher.wire.messages import Fault, Member, NodeReport, PairTest

SECRET = b"0123456789abcdef"
FIRST = Member(0, "n0", 1, "127.0.0.1")


@contextmanager
def serving(says: bytes, *, is_ours: bool = True) -> Iterator[int]:
    """Say this at a port, for one connection: as a node rank 0 that lets it in, or another."""

    def serve(server: socket.socket) -> None:
        if is_ours:
            with contextlib.closing(Acceptor(server, Access(SECRET), print)) as acceptor:
                while not (let_in := acceptor.wait(1.0)):
                    pass
            visitor = let_in[0][0]
        else:
            visitor, _ = server.accept()
        with visitor:
            visitor.sendall(says)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        thread.join()


def visit_at(port: int, within_s: float = 5.0) -> list[Fault]:
    me, wait = NodeReport(1, 3, 1, "n1", ""), Wait(within_s)
    return between_nodes.visit_master("127.0.0.1", port, me, SECRET, wait)[0]


def visit(test: PairTest) -> list[Fault]:
    with serving(f'{{"PairTest":{encode(test)}}}\n'.encode()) as port:
        return visit_at(port)


@pytest.mark.parametrize(("ahead", "sound"), [(0, True), (-4, True), (42, False), (-42, False)])
def test_clocks(listener: int, ahead: float, sound: bool) -> None:
    faults = visit(PairTest([replace(FIRST, failover_port=listener)], "", time.time() - ahead))
    assert sound == (not faults)
    for fault in faults:
        assert (fault.name, fault.warns) == ("clock-skew", True)
        assert fault.cause == f"the clock is {ahead:+d} s from node rank 0's"


def test_another_port_that_is_closed() -> None:
    port = free_port()
    (fault,) = visit(PairTest([replace(FIRST, failover_port=port)]))
    assert (fault.name, fault.cause) == (
        "port-blocked",
        f"cannot reach n0 (127.0.0.1:{port}) (Connection refused)",
    )


@pytest.mark.parametrize(
    ("says", "is_ours"),
    [
        *((says, False) for says in (b"", b"HTTP/1.1 400 Bad Request\r\n", b"x" * 96)),
        *((says, True) for says in (b"", b"{}\n", b"7\n", b'{"PairTest": {"members": 7}}\n')),
        (b"[" * 5000 + b"\n", True),
    ],
)
def test_an_answer_that_is_none_is_left_to_node_rank_0(says: bytes, is_ours: bool) -> None:
    with serving(says, is_ours=is_ours) as port:
        assert visit_at(port) == []


def test_a_master_that_refuses_until_the_deadline() -> None:
    (fault,) = visit_at(free_port(), within_s=0.2)
    assert fault.name == "port-blocked"
    assert fault.cure == "open the port in the firewall"


@pytest.mark.parametrize("code", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET])
def test_a_network_that_has_just_come_back(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    failures = iter([OSError(code, os.strerror(code))] * 3)
    connected = socket.socket()

    def connect(*_: object) -> socket.socket:
        for error in failures:
            raise error
        return connected

    monkeypatch.setattr(between_nodes, "connect", connect)
    with connected:
        assert between_nodes._reach("10.0.0.1", 1, SECRET, Wait(5)) is connected


@pytest.mark.slow
def test_a_port_that_is_closed(listener: int) -> None:
    closed = [free_port() for _ in range(5)]
    ports = [listener, *closed]
    members = [Member(at, f"n{at}", 1, "127.0.0.1", port) for at, port in enumerate(ports)]
    (fault,) = meeting.try_members(members, 4, 5)
    assert fault.name == "port-blocked"
    first = f"cannot reach n5 (127.0.0.1:{closed[4]}), n1 (127.0.0.1:{closed[0]}), n2 ("
    assert fault.cause.startswith(first)
    assert fault.cause.endswith(") and 1 more (Connection refused)")


def test_a_port_takes_in_what_is_passed_though_nobody_reads_it() -> None:
    with meeting.open_failover_port("127.0.0.1") as listener:
        members = [Member(rank, "n", 1, *listener.getsockname()) for rank in range(1, 65)]
        assert [*meeting.try_members(members, 0, PATIENCE_S)] == []


def test_a_port_that_opens_late_is_tried_again() -> None:
    """As after a cut, when a network has no route for the first second."""
    port = free_port()
    faults: list[Fault] = []

    def visit() -> None:
        faults.extend(meeting.try_members([replace(FIRST, failover_port=port)], 1, 5))

    visitor = threading.Thread(target=visit)
    visitor.start()
    time.sleep(0.5)
    with open_port(port, "127.0.0.1"):
        visitor.join()
    assert faults == []
