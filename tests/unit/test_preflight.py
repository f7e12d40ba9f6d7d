"""A node's preflight: its report, the faults that nodes find together, and where they meet."""

import contextlib
import dataclasses
import errno
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import PATIENCE_S, ROOT, execute
from ports import free_port

from distributed.errors import Refused
from launcher import own_time
from launcher.agent import join
from launcher.agent.nodes import checkin
from launcher.agent.torchrun_arguments import parse
from launcher.handshake import Acceptor, Access
from launcher.master_port import open_port
from launcher.preflight import between_nodes, compare
from launcher.preflight.check_node import MARK, check_node, read_report
from launcher.preflight.compare import Finding, combine
from launcher.preflight.must_match import ARGUMENTS, describe_program
from launcher.typed_json import encode
from launcher.wire import limits, meeting
from launcher.wire.launcher_link import send_message
from launcher.wire.meeting import Wait
from launcher.wire.messages import (
    Fault,
    Member,
    NodeReport,
    PairResult,
    PairTest,
    Report,
    Request,
)
from launcher.wire.node_link import Link

OWN = ["127.0.0.1"]


def make_request(folder: Path, **changes: Any) -> Request:
    words, logs = [str(ROOT / "train.py")], Path("logs")
    request = Request(
        *("x", 1, 0, None, 2, "127.0.0.1", None, words, folder, logs, None),
        has_checks=True,
        backend="auto",
        num_workers=0,
        meeting_size=0,
        within_s=limits.MEETING_S,
    )
    return replace(request, **changes)


def test_what_the_plan_must_know(tmp_path: Path) -> None:
    report = check_node(make_request(tmp_path), {"CUDA_VISIBLE_DEVICES": ""})
    assert (report.gpus, report.nproc, report.node_rank) == (0, 2, 0)
    assert 10_000 <= report.port < 32_768
    assert check_node(make_request(tmp_path, nproc=3, port=4000), {}).nproc == 3
    assert list(tmp_path.iterdir()) == []


def test_without_checks_there_are_no_faults(tmp_path: Path) -> None:
    request = make_request(tmp_path, words=["none.py"])
    assert [fault.name for fault in check_node(request, {}).faults if not fault.warns] == [
        "env-missing"
    ]
    unchecked = make_request(tmp_path, words=["none.py"], has_checks=False)
    assert check_node(unchecked, {}).faults == []


# --- several nodes ------------------------------------------------------------------------------


def start_node(folder: Path, node_rank: int, port: int, *words: str) -> subprocess.Popen[str]:
    """Start one of three nodes, all of which are this machine."""
    request = make_request(
        folder,
        num_nodes=3,
        node_rank=node_rank,
        meeting_size=3,
        within_s=PATIENCE_S,
        port=port,
        words=words,
    )
    return subprocess.Popen(
        [sys.executable, "scripts/lib/start.py", "launcher.preflight.check_node", encode(request)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_nodes_that_match_meet_and_pass(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")
    port = free_port()
    words = ["own.py", "x" * 300, " a  b ", "--flag"]
    nodes = [start_node(tmp_path, rank, port, *words) for rank in (2, 1, 0)]
    said = [node.communicate()[0].encode() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 0]
    outcome = combine([*filter(None, map(read_report, reversed(said)))])
    assert (outcome.num_checks, outcome.num_nodes) == (29, 3)
    assert all(one.fault.warns for one in outcome.findings)
    names = [one.fault.name for one in outcome.findings]
    assert names.count("loopback-address") == 3  # a warning, because 127.0.0.1 may be intended


def test_a_report_is_found_among_other_lines(capfd: pytest.CaptureFixture[str]) -> None:
    report = make_report(0, faults=[], met=[BLOCKED], done=[])
    send_message(f"{MARK}.0", report)
    told = capfd.readouterr().out.encode()
    assert read_report(b"the image's banner\n" + told) == report
    assert read_report(told[:-5]) is None
    assert read_report(b'\x02node.0 {"Report":{"node_rank":"1"}}\n') is None


# --- what must be the same on every node ----------------------------------------------------------


@pytest.mark.slow
def test_what_is_the_same_is_told_without_torch() -> None:
    code = "from launcher.preflight.must_match import versions"
    code += "; import sys; print(versions()['torch'], 'torch' in sys.modules)"
    told = execute(ROOT, sys.executable, "-c", code).stdout
    assert told == f"{torch.__version__} False\n"


def test_this_project_is_hashed_too(tmp_path: Path) -> None:
    for name in ("launcher", "distributed", "training"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc"))
    code = "from pathlib import Path; from launcher.preflight import must_match"
    code += "; print(must_match.hash_files([], Path())['this project'])"

    def hash_of(folder: Path) -> str:
        return execute(folder, sys.executable, "-c", code).stdout

    assert hash_of(tmp_path) == hash_of(ROOT)
    (tmp_path / "training/tasks/__init__.py").write_text("changed")
    assert hash_of(tmp_path) != hash_of(ROOT)


def test_arguments_and_their_files_may_differ_without_a_preflight(tmp_path: Path) -> None:
    script, config = tmp_path / "own.py", tmp_path / "my.yaml"
    for file in (script, config):
        file.touch()
    words = [str(script), "--config", str(config), "a b"]
    told = describe_program(words, "", skips_arguments=False)
    assert {*told} == {"this project", ARGUMENTS, "own.py", "my.yaml"}
    assert told[ARGUMENTS] == f"--config {config} 'a b'"
    told = describe_program(words, str(config), skips_arguments=True)
    assert {*told} == {"this project", "own.py", "my.yaml"}  # own.py is the task's module
    other = [str(script), "--config", "other.yaml"]
    one, two = (describe_program(each, "", skips_arguments=True) for each in (words, other))
    assert one == two


@pytest.mark.parametrize(
    ("is_by_hand", "skipped", "compares"),
    [(True, "", True), (True, "1", True), (False, "", False), (False, "1", True)],
)
def test_files_that_a_preflight_has_compared_are_not_compared_again(
    monkeypatch: pytest.MonkeyPatch, is_by_hand: bool, skipped: str, compares: bool
) -> None:
    told: list[NodeReport] = []

    def meet(address: str, port: int, me: NodeReport, *rest: object, **options: object) -> None:
        told.append(me)
        raise Refused("node-missing", "nobody is there")

    monkeypatch.setattr(checkin, "meet", meet)
    words = ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "x.py"]
    args, _ = parse(words, {"SKIP_PREFLIGHT": skipped})
    with pytest.raises(Refused):
        join.join_run(args, is_by_hand=is_by_hand)
    (report,) = told
    assert ("this project" in report.files) == compares
    assert "torch" in report.versions


# --- what several nodes found, together -----------------------------------------------------------


BLOCKED = Fault("port-blocked", "no way", "open it")


def make_report(node_rank: int, **changes: Any) -> Report:
    report = Report(
        node_rank=node_rank,
        num_nodes=3,
        nproc=1,
        host=f"node{node_rank + 1}",
        run_id="x",
        versions={"python": "3.11", "torch": "2.13.0"},
        files={"own.py": "aa", "my.yaml": "bb"},
    )
    return dataclasses.replace(report, **changes)


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([{}, {"versions": {"python": "3.12", "torch": "2.13.0"}}], ["version-mismatch"]),
        ([{}, {"versions": {"python": "3.11", "torch": "2.6.0"}}], ["version-mismatch"]),
        ([{}, {"versions": {"python": "3.11", "torch": ""}}], []),  # which the node reports itself
        ([{"versions": {"python": "3.11", "torch": ""}}, {}], []),
        ([{}, {"files": {"own.py": "aa"}}, {"files": {}}], ["code-mismatch"] * 3),
        ([{"files": {"own.py": "aa"}}, {}], ["code-mismatch"]),
        ([{}, {"met": [BLOCKED]}, {"met": [BLOCKED]}], ["port-blocked"] * 2),
        ([{"faults": [Fault("port-in-use", "", "")]}, {"met": [BLOCKED]}], []),
        ([{}, {"faults": [Fault("loopback-address", "", "")], "met": [BLOCKED]}], []),
        ([{"faults": [Fault("small-shm", "", "")]}, {"met": [BLOCKED]}], ["port-blocked"]),
    ],
)
def test_differences_between_nodes(nodes: list[dict[str, Any]], found: list[str]) -> None:
    reports = [make_report(rank, **changes) for rank, changes in enumerate(nodes)]
    assert [one.fault.name for one in compare.find_differences(reports)] == found


def test_a_node_that_reports_nonsense_does_not_fill_the_terminal() -> None:
    faults = [Fault("small-shm", "x\x1b[2J" + "y" * 5000, "z", warns=True)] * 20_000
    outcome = combine([make_report(0, faults=[*faults, Fault("port-in-use", "taken", "end it")])])
    out = io.StringIO()
    began = time.process_time()  # of this process: other programs may keep it waiting
    assert compare.print_findings(outcome, "p", is_strict=False, out=out)
    assert time.process_time() - began < 5
    first, *others, last = out.getvalue().splitlines()
    assert first == "p: node1: taken; end it [port-in-use]"
    assert len(others) == compare.MOST_SHOWN - 1 and last == "p: 19801 more findings"
    assert all(len(line) < 1100 and "\x1b" not in line for line in others)


def test_no_word_of_the_port_of_a_node_that_gave_no_report() -> None:
    files = {"own.py": "aa", "my.yaml": "cc"}
    outcome = combine([make_report(1), make_report(2, met=[BLOCKED], files=files)])
    assert [(one.host, one.fault.name) for one in outcome.findings] == [("node3", "code-mismatch")]


# --- the nodes meet at the master's port ----------------------------------------------------------


SECRET = b"0123456789abcdef"
FIRST = Member(0, "n0", 1, "127.0.0.1")


@contextmanager
def serving(says: bytes, *, is_ours: bool = True) -> Iterator[int]:
    """Send this over one connection, as node rank 0 to a node that it let in, or as a stranger."""

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
    return between_nodes.join_meeting("127.0.0.1", port, me, SECRET, wait)[0]


def test_in_a_large_run_each_node_tries_its_neighbours() -> None:
    members = [replace(FIRST, node_id=number) for number in range(1024)]
    tried = [[one.node_id for one in meeting.neighbours(members, me)] for me in range(1024)]
    assert tried[3] == [*range(4, 68)] and tried[1000] == [*range(1001, 1024), *range(41)]
    assert set(Counter(number for few in tried for number in few).values()) == {64}
    near = [one.node_id for one in meeting.neighbours(members[:4], 2)]
    assert near == [3, 0, 1, 2]
    assert [one.node_id for one in meeting.neighbours(members[:1], 2)] == [0]


def test_a_warning_of_many_nodes_is_one_line() -> None:
    shared, own = Fault("small-shm", "it is small", "raise it", True), Fault("disk-low", "c", "d")
    findings = [Finding(f"node{number:04}", shared) for number in range(1, 1025)]
    findings.insert(1, Finding("node0001", own))
    out = io.StringIO()
    told = compare.Preflight(1, findings, 1024, 0.1)
    assert compare.print_findings(told, "x.sh", is_strict=False, out=out)
    assert out.getvalue().splitlines() == [
        "x.sh: node0001: c; d [disk-low]",
        "x.sh: warning: node[0001-1024]: it is small; raise it [small-shm]",
    ]


def visit(test: PairTest) -> list[Fault]:
    with serving(f'{{"PairTest":{encode(test)}}}\n'.encode()) as port:
        return visit_at(port)


@pytest.mark.parametrize(("ahead", "sound"), [(0, True), (-4, True), (42, False), (-42, False)])
def test_clocks(listener: int, ahead: float, sound: bool) -> None:
    faults = visit(PairTest([replace(FIRST, failover_port=listener)], "", time.time() - ahead))
    assert sound == (not faults)
    for fault in faults:
        assert (fault.name, fault.warns) == ("clock-skew", True)
        told = re.fullmatch(r"the clock differs from node rank 0's by ([+-]\d+) s", fault.cause)
        assert told and 0 <= int(told[1]) - ahead < 20  # its answer took a while to arrive


def test_other_ports_of_a_master_behind_a_service_are_tried_at_its_own_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    tried: list[str] = []

    def answer() -> None:
        test = node.wait(own_time.now() + PATIENCE_S)
        assert isinstance(test, PairTest)
        tried.append(test.members[0].address)
        node.send(PairResult([*meeting.try_members(test.members, 1, 3.0)] if tried == OWN else []))

    with contextlib.closing(Link(there)) as node, contextlib.closing(Link(here)) as master:
        thread = threading.Thread(target=answer)
        thread.start()
        service = replace(FIRST, address="203.0.113.9")  # leads here, for one port
        others = {Member(1, "n1", 1, "127.0.0.1"): master}
        assert meeting.try_pairs(service, others, PATIENCE_S, PATIENCE_S) == []
        thread.join()
    assert tried == OWN


def test_another_port_that_is_closed() -> None:
    port = free_port()
    (fault,) = visit(PairTest([replace(FIRST, failover_port=port)], ""))
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
    monkeypatch.setattr(limits, "GREETING_S", 60.0)
    with connected:
        assert between_nodes._reach("10.0.0.1", 1, SECRET, Wait(PATIENCE_S)) is connected


@pytest.mark.slow
def test_a_port_that_is_closed(listener: int) -> None:
    closed = [free_port() for _ in range(5)]
    ports = [listener, *closed]
    members = [Member(at, f"n{at}", 1, "127.0.0.1", port) for at, port in enumerate(ports)]
    (fault,) = meeting.try_members(meeting.neighbours(members, 4), 4, 5)
    assert fault.name == "port-blocked"
    first = f"cannot reach n5 (127.0.0.1:{closed[4]}), n1 (127.0.0.1:{closed[0]}), n2 ("
    assert fault.cause.startswith(first)
    assert fault.cause.endswith(") and 1 more (Connection refused)")


def test_a_port_takes_in_what_is_passed_though_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "GREETING_S", 60.0)
    with meeting.open_failover_port("127.0.0.1") as listener:
        members = [Member(rank, "n", 1, *listener.getsockname()) for rank in range(1, 65)]
        assert [*meeting.try_members(members, 0, PATIENCE_S)] == []


def test_a_port_that_opens_late_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a cut, when the network has no route for the first second."""
    monkeypatch.setattr(limits, "GREETING_S", 60.0)
    port = free_port()
    faults: list[Fault] = []

    def visit() -> None:
        faults.extend(meeting.try_members([replace(FIRST, failover_port=port)], 1, 60))

    visitor = threading.Thread(target=visit)
    visitor.start()
    time.sleep(0.5)
    with open_port(port, "127.0.0.1"):
        visitor.join()
    assert faults == []
