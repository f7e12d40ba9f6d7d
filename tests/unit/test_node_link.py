"""Messages between agents and launchers arrive as they were sent; others are rejected."""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from agents import eventually

from launcher import own_time
from launcher.failure import Failure
from launcher.outcome import NodeEnd, Outcome
from launcher.typed_json import MessageError, decode, encode
from launcher.wire import limits, messages
from launcher.wire.launcher_link import BEGIN, LONGEST_MESSAGE, Answers, read_request, send_message
from launcher.wire.messages import (
    Assignment,
    EndRanks,
    Exit,
    Member,
    NodeBeat,
    Parts,
    Ready,
    SnapshotData,
    SnapshotPiece,
    StopRequest,
    Sweep,
    Verdict,
)
from launcher.wire.node_link import Link, Pulse
from launcher.wire.states import RankState

FAR_S = 60.0  # only ends a test that hangs
FAILURE = Failure("rank-error", "ü\n", 1, "node2", 1, 5.5, 3, 1, ["a.py:1 in f"], stacks={"a": [1]})
NEXT = Assignment("r1", 0, 8, ["node1"], 1, "", 0, members=[], spares=[], node_rank=0)
EXAMPLES = [  # with every type that a field can have
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


@pytest.fixture
def connected() -> Iterator[tuple[Link, socket.socket]]:
    """Two ends of a TCP connection; the second has no agent."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
        server.accept()[0] as there,
    ):
        yield Link(here), there


def test_a_silent_node_is_one_that_acknowledges_or_one_that_is_cut_off(
    connected: tuple[Link, socket.socket],
) -> None:
    link, _ = connected
    link.silence_s = 2.0
    eventually(lambda: link.is_silent, "a silence in which nothing is sent or acknowledged")
    failure = link.loss(1, "node2")
    assert failure.fault == "link-lost"
    assert failure.cause == "no heartbeat for 2 s (network down?)"

    def sent_cause() -> str:
        link.send(NodeBeat(None))  # the other end's kernel acknowledges it
        return link.loss(1, "node2").cause

    stopped = "no heartbeat for 2 s (its node agent is stopped, or hangs)"
    eventually(lambda: sent_cause() == stopped, "the acknowledgement")


@pytest.mark.parametrize("where", ["sendall", "recv"])
@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ECONNRESET, ("agent-killed", "its node agent is gone")),
        (errno.ETIMEDOUT, ("link-lost", "Connection timed out (network down?)")),
        (errno.EHOSTUNREACH, ("link-lost", "No route to host (network down?)")),
    ],
)
def test_a_connection_that_the_kernel_gives_up_is_a_lost_link(
    connected: tuple[Link, socket.socket], where: str, number: int, told: tuple[str, str]
) -> None:
    link, there = connected
    if where == "recv":
        there.send(b"x")
    link.socket = Mock(wraps=link.socket, **{f"{where}.side_effect": OSError(number, "")})
    link.send(NodeBeat(None))
    assert link.receive() is None
    failure = link.loss(1, "node2")
    assert (failure.fault, failure.cause) == told


def test_a_line_without_end_is_no_agents() -> None:
    peer, theirs = connect()
    for _ in range(140):
        theirs.sendall(b"x" * 65536)
        if peer.receive() is None:
            return
    raise AssertionError("took more than 8 MiB")


def test_a_message_may_name_the_members_of_a_very_large_run() -> None:
    hosts = [f"cluster-gpu-{node:05}.example.org" for node in range(50_000)]
    members = [Member(node, host, 8, "10.100.100.100", 45678) for node, host in enumerate(hosts)]
    sent = Assignment("run", 7, 400_000, hosts, 0, "", 0, members=members, spares=[])
    peer, theirs = connect()
    sending = threading.Thread(target=Link(theirs).send, args=[sent])
    sending.start()
    assert peer.wait(own_time.now() + 60) == sent
    sending.join()


def test_heartbeats_go_on_while_the_loop_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BEAT_S", 0.01)
    (first, theirs), (other, its) = connect(), connect()
    pulse = Pulse(lambda: [first, other])
    state = NodeBeat(RankState(3, (120, 2), True, False, 61.5))
    first._sending.acquire()  # a long message is on its way
    first.send(EndRanks())  # as a signal handler does during a send
    pulse.send_beat(state)
    listener, of_other = Link(theirs), Link(its)
    until = time.monotonic() + FAR_S
    while of_other.wait(until) != state:
        pass  # sent before note()
    assert [of_other.wait(until) for _ in range(3)] == [state] * 3  # without another note()
    first._sending.release()
    while listener.wait(until) != state:
        pass
    pulse.end()


def test_an_agent_that_is_held_up_for_too_long_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HELD_UP_S", 0.0)
    link, theirs = connect()
    Pulse(lambda: [link]).end()
    link.close()
    assert theirs.recv(1) == b""


def test_a_single_node_needs_no_thread_for_heartbeats_until_a_spare_comes() -> None:
    before, everyone = threading.active_count(), list[Link]()
    Pulse(lambda: everyone).end()
    pulse = Pulse(lambda: everyone)
    assert threading.active_count() == before
    link, theirs = connect()
    everyone.append(link)
    pulse.send_beat(NodeBeat(None))
    assert Link(theirs).wait(time.monotonic() + FAR_S) == NodeBeat(None)
    pulse.end()


# --- a node's stdout: output, with messages in between --------------------------------------------


TOKEN = "0f" * 16
READY, EXIT = b'{"Ready":{}}', b'{"Exit":{"code":3,"left":0}}'


def read(pieces: list[bytes]) -> tuple[bytes, list[tuple[int, object]]]:
    answers, output, told = Answers(TOKEN), b"", []
    for piece in (*pieces, b""):
        text, came = answers.read(piece)
        output += text
        told += came
    return output, told


def told_by(node: int, capfd: pytest.CaptureFixture[str], message: object = None) -> list[bytes]:
    """Return the lines in which a node sends the message."""
    send_message(f"{TOKEN}.{node}", message)
    return capfd.readouterr().out.encode().splitlines(keepends=True)


@pytest.mark.parametrize("size", range(1, 120))
def test_messages_are_found_wherever_they_are_cut(size: int) -> None:
    mark, no = f"{BEGIN}{TOKEN}.7 ".encode(), f"{BEGIN}{TOKEN}.x no\n".encode()
    text = b"a\n" + mark + READY + b"\nhalf a line" + mark + EXIT + b"\n" + no + b"rest \x020f\x02"
    output, told = read([text[at : at + size] for at in range(0, len(text), size)])
    assert told == [(7, Ready()), (7, Exit(3, 0))]
    assert output == b"a\nhalf a line" + no + b"rest \x020f\x02"


@pytest.mark.parametrize("size", range(1, 200, 3))
def test_a_long_message_comes_in_lines_among_those_of_others(
    size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    sent = {node: Sweep(f"{node}" * 2000) for node in (1, 2)}
    first, second = (told_by(node, capfd, message) for node, message in sent.items())
    (beat,) = told_by(1, capfd)
    assert len(first) > 2 and max(map(len, first)) < 1024  # srun keeps such lines together
    mixed = [line for pair in zip(second, first, strict=True) for line in (b"out", *pair, beat)]
    text = b"".join(mixed)
    output, told = read([text[at : at + size * 9] for at in range(0, len(text), size * 9)])
    assert [(node, message) for node, message in told if message] == [(2, sent[2]), (1, sent[1])]
    assert output == b"out" * len(first)


def test_what_is_no_message_is_output(capfd: pytest.CaptureFixture[str]) -> None:
    lines = told_by(1, capfd, Sweep("x" * 2000))
    for wrong in (b'{"Exit":{"code":3}}', b'{"Other":{}}', b"no message"):
        line = f"{BEGIN}{TOKEN}.1 ".encode() + wrong + b"\n"
        assert read([line]) == (line, [])
        output, told = read([*lines[:2], line])  # the message is incomplete
        assert output == line and not any(message for _, message in told)


def test_a_launchers_messages_are_read_one_at_a_time() -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b'\n\n{"StopRequest":{"signum":15}}\n{"Sweep":{"token":"t"}}\nno message\nx')
    assert read_request(ours) == StopRequest(15)
    assert read_request(ours) == Sweep("t")
    assert read_request(ours) is None
    assert os.read(ours, 9) == b"x"
    os.close(theirs)
    assert read_request(ours) is None
    os.close(ours)


def test_output_that_begins_like_a_message_is_held_up_no_longer_than_that() -> None:
    answers = Answers(TOKEN)
    assert answers.read(b"step 0f0") == (b"step 0f0", [])
    assert answers.read(b"\x020f") == (b"", [])
    assert answers.read(b" done") == (b"\x020f done", [])


def test_a_message_without_end_takes_no_memory() -> None:
    answers = Answers(TOKEN)
    answers.read(f"{BEGIN}{TOKEN}.0 ".encode())
    for _ in range(3 * LONGEST_MESSAGE // 65536):
        answers.read(b"x" * 65536)
        assert len(answers._text) <= LONGEST_MESSAGE


# --- messages arrive as they were sent ------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    name: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Outer:
    number: int
    is_set: bool
    path: Path
    inner: Inner | None = None
    words: Sequence[str] = ()
    all: Sequence[Inner] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


SMALL = {"number": 1, "is_set": True, "path": "/a"}


def test_what_is_sent_arrives() -> None:
    sent = Outer(1, False, Path("/a b"), Inner("x", 1.5), ["é\n", ""], [Inner("y")], {"a": "b"})
    assert "\n" not in encode(sent)
    assert decode(Outer, json.loads(encode(sent))) == sent


def test_defaults_and_whole_numbers() -> None:
    assert decode(Outer, SMALL) == Outer(1, True, Path("/a"))
    assert decode(Inner, {"name": "x", "seconds": 2}) == Inner("x", 2.0)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {**SMALL, "number": True},
        {**SMALL, "number": 1.0},
        {**SMALL, "is_set": 1},
        {**SMALL, "path": 1},
        {**SMALL, "unknown": 1},
        {**SMALL, "inner": {"name": "x", "seconds": float("nan")}},
        {**SMALL, "inner": {"name": "x", "seconds": 10**400}},
        {**SMALL, "inner": {"name": "x", "seconds": False}},
        {**SMALL, "words": "text"},
        {**SMALL, "words": [1]},
        {**SMALL, "versions": {"a": 1}},
        {**SMALL, "all": [{"name": "x"}, 7]},
    ],
)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(MessageError):
        decode(Outer, value)
