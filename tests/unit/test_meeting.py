"""The nodes meet at the master's port: clocks, a shared folder, ports, and strangers."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from agents import PATIENCE_S
from ports import free_port
from strangers import keep_silent

from launcher.handshake import Acceptor, Access, open_port
from launcher.preflight import master_port
from launcher.typed_json import encode
from launcher.wire import meeting
from launcher.wire.meeting import Wait
from launcher.wire.messages import Fault, Member, NodeReport, PairTest

SECRET = b"0123456789abcdef"
FIRST = Member(0, "n0", 1, "127.0.0.1")


@contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Have a thread serve one connection at a port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        thread.join()


def a_master(says: bytes) -> AbstractContextManager[int]:
    """Be a node rank 0 that says this to the first that it lets in."""

    def serve(server: socket.socket) -> None:
        with contextlib.closing(Acceptor(server, Access(SECRET), print)) as acceptor:
            while not (let_in := acceptor.wait(1.0)):
                pass
            with let_in[0][0] as visitor:
                visitor.sendall(says)

    return serving(serve)


def another_program(says: bytes) -> AbstractContextManager[int]:
    """Be a program that is not ours, for one connection."""

    def serve(server: socket.socket) -> None:
        with server.accept()[0] as visitor:
            visitor.sendall(says)

    return serving(serve)


def report_of(rank: int) -> NodeReport:
    return NodeReport(rank, 3, 1, f"n{rank}", "")


def visit_at(port: int, within_s: float = 5.0, *, rank: int = 1) -> list[Fault]:
    me, wait = report_of(rank), Wait(within_s)
    return list(master_port.visit_master("127.0.0.1", port, me, SECRET, wait, []))


def visit(says: bytes | PairTest) -> list[Fault]:
    if isinstance(says, PairTest):
        says = f'{{"pairs":{encode(says)}}}\n'.encode()
    with a_master(says) as port:
        return visit_at(port)


@pytest.mark.parametrize(("ahead", "sound"), [(0, True), (-4, True), (42, False), (-42, False)])
def test_clocks(listener: int, ahead: float, sound: bool) -> None:
    faults = visit(PairTest([replace(FIRST, failover_port=listener)], "", time.time() - ahead))
    assert sound == (not faults)
    for fault in faults:
        assert (fault.name, fault.warns) == ("clock-skew", True)
        assert fault.cause == f"the clock is {ahead:+d} s from node rank 0's"


def test_a_folder_that_is_not_shared(listener: int, tmp_path: Path) -> None:
    test = PairTest([replace(FIRST, failover_port=listener)], str(tmp_path / "file"))
    (fault,) = visit(test)
    assert (fault.name, fault.warns) == ("dir-not-shared", False)
    assert fault.cause == f"{str(tmp_path)!r} is another folder on node rank 0"
    (tmp_path / "file").touch()
    assert visit(replace(test, time=time.time())) == []


def test_another_port_that_is_closed() -> None:
    port = free_port()
    (fault,) = visit(PairTest([replace(FIRST, failover_port=port)]))
    assert (fault.name, fault.cause) == (
        "port-blocked",
        f"cannot reach n0 (127.0.0.1:{port}) (Connection refused)",
    )


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"x" * 96])
def test_another_program_at_the_port_is_left_to_node_rank_0(says: bytes) -> None:
    with another_program(says) as port:
        assert visit_at(port) == []


@pytest.mark.parametrize(
    "says", [b"", b"{}\n", b"7\n", b'{"pairs": {"members": 7}}\n', b"[" * 5000 + b"\n"]
)
def test_an_answer_that_is_none_is_left_to_node_rank_0(says: bytes) -> None:
    assert visit(says) == []


def test_strangers_are_no_nodes(listener: int) -> None:
    """Connections that say nothing, or the wrong things, do not take the place of a node."""
    port = free_port()
    wait = Wait(PATIENCE_S)
    host = threading.Thread(
        target=master_port.receive_others,
        args=(open_port(port), FIRST, Access(SECRET), 2, None, wait),
    )
    host.start()
    found: list[Fault] = []
    strangers = keep_silent(port, 50)
    for number, stranger in enumerate(strangers[::2]):
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * (number + 1))
    nodes = [
        threading.Thread(
            target=lambda rank: found.extend(visit_at(port, PATIENCE_S, rank=rank)), args=(rank,)
        )
        for rank in (1, 2)
    ]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    host.join()
    assert found == []
    assert wait.left_s > 0  # it waits for two nodes, no longer
    for stranger in strangers:
        stranger.close()


def test_a_master_that_refuses_until_the_deadline() -> None:
    (fault,) = visit_at(free_port(), within_s=0.2)
    assert fault.name == "port-blocked"
    assert fault.cure == "open the port in the firewall"


def test_a_master_that_comes_later(tmp_path: Path) -> None:
    port = free_port()
    found: list[Fault] = []
    visitor = threading.Thread(target=lambda: found.extend(visit_at(port, PATIENCE_S)))
    visitor.start()
    folder = tmp_path / "not" / "yet"
    wait = Wait(PATIENCE_S)
    master_port.receive_others(open_port(port), FIRST, Access(SECRET), 1, folder, wait)
    visitor.join()
    assert found == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET])
def test_a_network_that_has_just_come_back(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    failures = iter([OSError(code, os.strerror(code))] * 3)
    connected = socket.socket()

    def connect(*_: object) -> socket.socket:
        for error in failures:
            raise error
        return connected

    monkeypatch.setattr(master_port, "connect", connect)
    with connected:
        assert master_port._reach("10.0.0.1", 1, SECRET, Wait(5)) is connected


def test_every_pair_of_nodes_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    port, wait = free_port(), Wait(PATIENCE_S)
    tried: list[tuple[int, list[int]]] = []
    real = meeting.try_members

    def note(members: Sequence[Member], me: int, within_s: float) -> Iterator[Fault]:
        tried.append((me, sorted(one.node_id for one in members)))
        return real(members, me, within_s)

    monkeypatch.setattr(meeting, "try_members", note)
    done: list[list[str]] = [[], []]
    found: list[Fault] = []

    def visit_as(rank: int) -> None:
        names = done[rank - 1]
        me = report_of(rank)
        found.extend(master_port.visit_master("127.0.0.1", port, me, SECRET, wait, names))

    nodes = [threading.Thread(target=visit_as, args=(rank,)) for rank in (1, 2)]
    for node in nodes:
        node.start()
    listener = open_port(port)
    found += master_port.receive_others(listener, FIRST, Access(SECRET), 2, None, wait)
    for node in nodes:
        node.join()
    assert found == [] and wait.left_s > 0
    assert sorted(tried) == [(me, [0, 1, 2]) for me in range(3)]
    assert done == [["port", "clock", "other port", "pairs"]] * 2


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


@pytest.mark.slow
def test_a_port_that_large_packets_do_not_reach() -> None:
    """In place of a path that loses them: a port that takes a few KiB."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        other = Member(1, "n1", 1, *listener.getsockname())
        (fault,) = meeting.try_members([other], 0, PATIENCE_S)
    assert fault.name == "mtu-too-large"
    assert re.fullmatch(
        r"cannot reach n1 \(127.0.0.1:\d+\) \(it answers, but packets of \d+ bytes are lost\)",
        fault.cause,
    )


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
