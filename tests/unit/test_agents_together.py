"""Two node agents of one run, on loopback: check-in, one dies all stop, one verdict."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents import PATIENCE_S, PROGRAM, SECRET, Run
from ports import free_port

from distributed.errors import Refused
from launcher.agent.nodes import checkin
from launcher.handshake import Acceptor, Access
from launcher.preflight.must_match import ARGUMENTS
from launcher.wire.meeting import Wait
from launcher.wire.messages import NodeReport
from launcher.wire.node_link import Link

pytestmark = pytest.mark.slow

Start = Callable[..., list[Run]]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(tmp_path: Path, port: int, runs: list[Run]) -> Start:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def begin(what: str) -> list[Run]:
        for node in "01":
            world = ["--nnodes", "2", "--node-rank", node, "--nproc-per-node", "2"]
            where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
            runs.append(Run([*world, *where, str(script), what, "0"]))
        return runs

    return begin


@pytest.mark.long
def test_a_stop_on_one_node_reaches_the_others(start: Start) -> None:
    runs = start("save")
    for node, run in enumerate(runs):
        run.wait_for(f"armed {2 * node}", f"armed {2 * node + 1}")
    runs[1].process.send_signal(signal.SIGTERM)
    for run in runs:
        run.finish()
        assert run.process.returncode == 75
        run.assert_gone()


def test_a_silent_node_is_named(start: Start) -> None:
    runs = start("sleep")
    for run in runs:
        run.wait_for("ready")
    os.kill(runs[1].agent_pid(), signal.SIGSTOP)  # as a cut link looks from the other side
    err = runs[0].finish()
    assert "FAILED   node agent 1 (" in err
    assert "[link-lost]" in err


def test_a_node_that_comes_late_is_waited_for(port: int, tmp_path: Path) -> None:
    """With more ranks than the first one, which come after the first one's."""
    script = tmp_path / "count.py"
    script.write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo'); dist.barrier()\n"
        "e = os.environ\n"
        "print(e['RANK'], e['LOCAL_RANK'], e['WORLD_SIZE'], e['RUN_ID'], flush=True)\n"
    )
    common = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    early = ["--node-rank", "0", "--nproc-per-node", "1", "--rdzv-id", "named", str(script)]
    first = Run([*common, *early])
    assert first.process.stderr is not None
    assert "waiting for node rank 1, 300 s at most" in first.process.stderr.readline()
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\n\n{}\n")
        second = Run([*common, "--node-rank", "-1", "--nproc-per-node", "3", str(script)])
        assert f":{port}), as node rank 1\n" in second.finish()
    first.finish()
    lines = sorted((first.output + second.output).splitlines())
    assert lines == ["0 0 4 named", "1 0 4 named", "2 1 4 named", "3 2 4 named"]


def refused(port: int, folder: Path, *nodes: list[str], timeout_s: int = 60) -> list[str]:
    """Start agents that cannot agree; returns what each prints."""
    (folder / "x.py").write_text("print('never')")
    common = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    common += ["--rdzv-conf", f"join_timeout={timeout_s}"]
    runs = [Run([*common, *node, str(folder / "x.py")]) for node in nodes]
    told = [run.finish() for run in runs]
    for run in runs:
        run.assert_gone()
        assert run.process.returncode == 3
    return told


def test_what_node_rank_0_finds_after_the_check_in_refuses_all(port: int, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    first, second = ["--nnodes=2", "--log-dir", str(tmp_path / "logs")], ["--nnodes=2"]
    told = refused(port, tmp_path, [*first, "--node-rank=0"], [*second, "--node-rank=1"])
    for err in told:
        assert "[dir-unwritable]" in err and "FAILED" not in err


def test_a_missing_node_is_named(port: int, tmp_path: Path) -> None:
    [err] = refused(port, tmp_path, ["--nnodes=3", "--node-rank=0"], timeout_s=2)
    assert "node rank 1, 2 did not check in within 2 s" in err
    assert "[node-missing]" in err
    assert len(err.splitlines()) == 1


def test_a_missing_node_is_named_on_a_node_whose_own_wait_is_over(port: int) -> None:
    first, early = (NodeReport(rank, 3, 1, "here", "", {}, {}) for rank in (0, 1))
    secret = SECRET.encode()
    missing = r"node rank 2 did not check in within 3 s \(here: 0 \(.* \[node-missing\]$"
    with (
        checkin.listen("127.0.0.1", port) as listener,
        contextlib.closing(Acceptor(listener, Access(secret), print)) as acceptor,
        ThreadPoolExecutor() as pool,
    ):
        gathered = pool.submit(checkin.gather, acceptor, first, Wait(3))
        with pytest.raises(Refused, match=missing):
            checkin.join("127.0.0.1", port, early, secret, Wait(1.5))
        with pytest.raises(Refused, match=missing):
            gathered.result()


def test_a_master_that_is_not_there_is_named(port: int, tmp_path: Path) -> None:
    [err] = refused(port, tmp_path, ["--nnodes=2", "--node-rank=1"], timeout_s=4)
    waiting, verdict = err.splitlines()
    assert f"waiting for node rank 0 at 127.0.0.1:{port}, 4 s at most" in waiting
    assert "did not answer within 4 s (Connection refused); start node rank 0" in verdict
    assert verdict.endswith("[node-missing]")


def test_a_master_without_an_address_is_named(port: int) -> None:
    second = NodeReport(1, 2, 1, "there", "", {}, {})
    with pytest.raises(Refused) as refused:
        checkin.join("no-such-host.invalid", port, second, SECRET.encode(), Wait(1))
    assert refused.value.fault == "name-unresolved"


def check_in(port: int, *agents: NodeReport, address: str = "127.0.0.1") -> list[str]:
    """Have agents meet and try the ways between them; returns what each is told, or its part."""

    def meet(agent: NodeReport) -> str:
        try:
            access = Access(SECRET.encode())
            met = checkin.meet(address, port, agent, access, PATIENCE_S, tries_pairs=True)
            with met.ready():
                return str(met.assignment.node_rank)
        except Refused as refused:
            return str(refused)

    with ThreadPoolExecutor(len(agents)) as pool:
        return [*pool.map(meet, agents)]


def test_a_node_that_has_waited_long_is_not_said_to_have_another_clock(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    early = replace(THERE, time=time.time() - 60)
    assert check_in(port, HERE, early) == ["0", "1"]
    assert "clock" not in capsys.readouterr().err


def test_a_node_whose_report_is_lost_ends_the_check_in_of_all(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Link.send

    def lose(peer: Link, message: Any) -> None:
        if not isinstance(message, NodeReport):
            send(peer, message)

    monkeypatch.setattr(Link, "send", lose)
    monkeypatch.setattr(checkin, "find_loss", lambda connection, within_s: "it is lost")
    first, second = check_in(port, HERE, THERE)
    assert first == second
    assert first.startswith(f"there: cannot reach node rank 0 at 127.0.0.1:{port} (it is lost); ")
    assert first.endswith(" [mtu-too-large]")


HERE = NodeReport(0, 2, 2, "here", "run", {"torch": "2.13.0"}, {"x.py": "0123"})
THERE = replace(HERE, node_rank=1, host="there")


def test_a_master_whose_name_is_known_later_is_waited_for(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, resolve, asked = threading.Event(), socket.getaddrinfo, threading.Event()

    def look_up(name: str | None, *rest: Any, **options: Any) -> Any:
        if name == "later.invalid":
            asked.set()
            name = "127.0.0.1" if known.is_set() else name
        return resolve(name, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(check_in, port, THERE, address="later.invalid")
        assert asked.wait(PATIENCE_S)
        first = pool.submit(check_in, port, HERE)
        known.set()
        assert (first.result(), second.result()) == (["0"], ["1"])


def test_nodes_without_a_node_rank_get_those_that_are_free(port: int) -> None:
    agents = [replace(HERE, num_nodes=3, node_rank=rank) for rank in (0, -1, -1)]
    first, *others = check_in(port, *agents)
    assert (first, sorted(others)) == ("0", ["1", "2"])


def test_a_node_of_another_run_is_sent_away_and_the_run_waits_on(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "other has run id own, here has run; "
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(check_in, port, HERE)
        refused = check_in(port, replace(THERE, host="other", run_id="own"))
        assert refused == [f"{told}do not set RUN_ID, or set the same one [wrong-world]"]
        assert (check_in(port, THERE), first.result()) == (["1"], ["0"])
    assert f"warning: {told}sent it away, waiting for this run's own" in capsys.readouterr().err


TWICE = [replace(one, num_nodes=3) for one in (HERE, THERE, THERE)]
ARGUED = [replace(one, files={ARGUMENTS: one.host}) for one in (HERE, THERE)]


@pytest.mark.parametrize(
    ("agents", "fault", "cause"),
    [
        (TWICE, "duplicate-node-rank", "node rank 1 was started twice, on there and on there; "),
        ([HERE, replace(THERE, num_nodes=3)], "wrong-world", "there was started as node 1 of 3, h"),
        ([HERE, replace(THERE, files={})], "code-mismatch", "and 'missing' on node rank 1 (there)"),
        (ARGUED, "code-mismatch", "the same, or set SKIP_PREFLIGHT=1 on every node"),
        ([HERE, replace(THERE, versions={"torch": "2.14"})], "version-mismatch", "and '2.14' on "),
    ],
)
def test_nodes_that_differ_are_refused(
    port: int, agents: list[NodeReport], fault: str, cause: str
) -> None:
    for told in check_in(port, *agents):
        assert cause in told and told.endswith(f" [{fault}]")


@pytest.mark.long
def test_a_node_that_comes_when_the_run_has_begun_is_told(start: Start, port: int) -> None:
    runs = start("sleep")
    for run in runs:
        run.wait_for("ready")
    late = start("sleep")[3]  # node rank 1 once more, after a node rank 0 that finds the port taken
    err = late.finish()
    assert late.process.returncode == 3
    assert "rejected node rank 1: the run has already started" in err
    assert "[duplicate-node-rank]" in err
