"""The nodes meet at the master's port: clocks, a shared folder, ports, and strangers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import free_port

from launcher.preflight import meeting
from launcher.preflight.checks import Fault


@contextmanager
def a_master(says: bytes) -> Iterator[int]:
    """Be a node rank 0 that says this to the first that comes to its port."""

    def serve() -> None:
        with server.accept()[0] as visitor:
            visitor.sendall(says)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        thread.join()


def visit(says: bytes) -> list[Fault]:
    with a_master(says) as port:
        return list(meeting.visit_master("127.0.0.1", port, time.monotonic() + 5))


@pytest.mark.parametrize(("ahead", "sound"), [(0, True), (-4, True), (42, False), (-42, False)])
def test_clocks(listener: int, ahead: float, sound: bool) -> None:
    greeting = {"port": listener, "file": "", "time": time.time() - ahead}
    faults = visit(json.dumps(greeting).encode() + b"\n")
    assert sound == (not faults)
    for fault in faults:
        assert (fault.name, fault.warns) == ("clock-skew", True)
        assert fault.cause == f"the clock is {ahead:+d} s from node rank 0's"


def test_a_folder_that_is_not_shared(listener: int, tmp_path: Path) -> None:
    greeting = {"port": listener, "file": str(tmp_path / "file"), "time": time.time()}
    (fault,) = visit(json.dumps(greeting).encode() + b"\n")
    assert (fault.name, fault.warns) == ("dir-not-shared", False)
    assert fault.cause == f"{str(tmp_path)!r} is another folder on node rank 0"
    (tmp_path / "file").touch()
    assert visit(json.dumps(greeting).encode() + b"\n") == []


def test_another_port_that_is_closed() -> None:
    port = free_port()
    greeting = {"port": port, "file": "", "time": time.time()}
    (fault,) = visit(json.dumps(greeting).encode() + b"\n")
    assert (fault.name, fault.cause) == (
        "port-blocked",
        f"no way to 127.0.0.1:{port} (Connection refused)",
    )


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"{}\n", b"7\n"])
def test_another_program_at_the_port_is_left_to_node_rank_0(says: bytes) -> None:
    assert visit(says) == []


def test_a_master_that_refuses_until_the_deadline() -> None:
    (fault,) = meeting.visit_master("127.0.0.1", free_port(), time.monotonic() + 0.2)
    assert fault.name == "port-blocked"
    assert fault.cure == "open the port in the firewall"


def test_a_master_that_comes_later(tmp_path: Path) -> None:
    port = free_port()
    found: list[Fault] = []
    deadline = time.monotonic() + 20
    visitor = threading.Thread(
        target=lambda: found.extend(meeting.visit_master("127.0.0.1", port, deadline))
    )
    visitor.start()
    meeting.receive_others(port, 1, tmp_path / "not" / "yet", deadline)
    visitor.join()
    assert found == []
    assert list(tmp_path.iterdir()) == []
