"""What the agents say to each other arrives as it was sent; anything else is no agent."""

from __future__ import annotations

import socket
import time

import pytest

from launcher.agent.diagnosis.stuck import RankState
from launcher.failure import Failure
from launcher.outcome import NodeEnd, Outcome
from launcher.wire import messages
from launcher.wire.messages import (
    Assignment,
    EndRanks,
    NodeBeat,
    Parts,
    SnapshotData,
    SnapshotPiece,
    StopRequest,
    Verdict,
)
from launcher.wire.node_link import Link

FAILURE = Failure("rank-error", "ü\n", 1, "node2", 1, 5.5, 3, 1, ["a.py:1 in f"], stacks=[])
NEXT = Assignment("r1", 0, 8, ["node1"], 0, 1, members=[], spares=[])
EXAMPLES = [  # with all that a field can be
    NodeBeat(RankState(3, (120, 2), True, False, 61.5)),
    NodeEnd([2], 4, [1, 137, 75], 120, {"115": [4], "120": [4]}, {"120": [2]}),
    Verdict(Outcome(1, FAILURE, 2, 1), NEXT, parts=Parts(120, "step-120.tmp-0f", [3])),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_is_one_line_and_arrives(message: object) -> None:
    line = messages.write(message)
    assert "\n" not in line
    assert messages.read(line) == message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.0",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"EndRanks": {}, "NodeBeat": {"straggler": null}}',
        b'{"unknown": {}}',
        b'{"StopRequest": {"signum": "15"}}',
        b'{"SnapshotPiece": {"step": 5, "offset": 64, "length": -9}}',
        b'{"Verdict": {"outcome": {"code": 1}, "parts": {"step": 1, "folder": "../x"}}}',
        b"[" * 100_000,
    ],
)
def test_any_other_line_is_no_agents(line: bytes) -> None:
    with pytest.raises(ValueError):
        messages.read(line)


def connect() -> tuple[Link, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return Link(listener.accept()[0]), theirs


def test_messages_arrive_in_pieces_and_together() -> None:
    peer, theirs = connect()
    line = f"{messages.write(StopRequest(2))}\n".encode()
    theirs.sendall(line[:5])
    assert peer.receive() == []
    theirs.sendall(line[5:] + f"{messages.write(EndRanks())}\n{{".encode())
    assert peer.receive() == [StopRequest(2), EndRanks()]
    theirs.sendall(b"}\n")
    assert peer.receive() is None


def test_the_bytes_of_a_snapshot_follow_their_line() -> None:
    data = b"\n{}\x00" * 1000
    sent = SnapshotData(SnapshotPiece(5, 64, len(data)), data)
    peer, theirs = connect()
    other = Link(theirs)
    other.send(sent)
    other.send(EndRanks())
    assert peer.wait(time.monotonic() + 5) == sent
    assert peer.wait(time.monotonic() + 5) == EndRanks()
    line = f"{messages.write(sent.piece)}\n".encode()
    theirs.sendall(line + data[:10])
    assert peer.receive() == []
    theirs.sendall(data[10:])
    assert peer.receive() == [sent]
    theirs.sendall(line.replace(b'"offset":64', b'"offset":-1'))
    assert peer.receive() is None


def test_a_peer_that_has_gone_is_noticed_where_it_is_read() -> None:
    peer, theirs = connect()
    theirs.close()
    peer.send(EndRanks())
    assert peer.receive() is None
    assert peer.wait(time.monotonic() + 5) is None


def test_a_line_without_end_is_no_agents() -> None:
    peer, theirs = connect()
    for _ in range(40):
        theirs.sendall(b"x" * 65536)
        if peer.receive() is None:
            return
    raise AssertionError("took more than 2 MiB")
