"""Two node agents of one run, on loopback: the check-in, the common verdict, and strangers."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from agents import (
    PATIENCE_S,
    PROGRAM,
    SAVES_ON_SIGTERM,
    SECRET,
    Run,
    eventually,
    kill_what_is_left,
    rarely,
    world,
    written,
)
from ports import free_port

from distributed.errors import Refused
from launcher import handshake, own_time, processes
from launcher.agent import attempt as attempts
from launcher.agent.attempt import Attempt
from launcher.agent.facts import Facts
from launcher.agent.join import versions
from launcher.agent.node_ranks import Heartbeats, NodeRanks, Rank
from launcher.agent.nodes import checkin
from launcher.failure import Failure
from launcher.handshake import Acceptor, Access
from launcher.outcome import NodeEnd
from launcher.preflight import must_match
from launcher.preflight.must_match import ARGUMENTS
from launcher.wire import limits, meeting, messages
from launcher.wire.meeting import Wait
from launcher.wire.messages import EndRanks, NodeReport, RanksSave
from launcher.wire.node_link import Link

pytestmark = pytest.mark.slow

Start = Callable[..., list[Run]]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(tmp_path: Path, port: int, runs: list[Run]) -> Start:
    script = written(tmp_path / "program.py", PROGRAM)

    def begin(**environ: str) -> list[Run]:
        for node in range(2):
            runs.append(Run([*world(port, node, nproc=2), str(script), "sleep", "0"], **environ))
        return runs

    return begin


def test_a_silent_node_is_named(start: Start) -> None:
    runs = start(SILENCE_SECONDS="10")
    for run in runs:
        run.wait_for("ready")
    os.kill(runs[1].agent_pid(), signal.SIGSTOP)  # its machine still acknowledges what is sent
    err = runs[0].finish()
    assert re.search(r": warning: no heartbeat for \d s; after 10 s, this node is lost", err)
    assert "FAILED   node agent 1 (" in err
    assert "[link-lost]" in err
    assert "cause    no heartbeat for 10 s (its node agent is stopped, or hangs)" in err


def test_a_node_that_stands_still_for_15_s_is_named_and_the_run_continues(start: Start) -> None:
    runs = start()
    for run in runs:
        run.wait_for("ready")
    still = [runs[1].process.pid, *processes.descendants(runs[1].process.pid)]
    for pid in still:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(15)  # the silence itself
    for pid in reversed(still):
        os.kill(pid, signal.SIGCONT)
    assert runs[0].process.stderr is not None
    told = ""
    while "heartbeats again" not in told:
        line = runs[0].process.stderr.readline()
        assert line, told
        told += line
    runs[0].process.terminate()
    err = told + runs[0].finish()
    host = re.escape(socket.gethostname())
    assert re.search(rf": {host}: warning: no heartbeat for 1\d s; after 60 s", err)
    assert re.search(rf": {host}: heartbeats again, after (1[3-9]|2\d) s", err)
    assert "FAILED" not in err and runs[0].process.returncode == 143


def test_a_rank_saves_after_a_failure_on_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int, runs: list[Run]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = written(tmp_path / "saves.py", SAVES_ON_SIGTERM)
    for node in range(2):
        runs.append(Run([*world(port, node, nproc=1), str(script), "save"]))
    told = [run.finish() for run in runs]
    assert all("cause    ValueError: bad" in err for err in told)
    assert [run.process.returncode for run in runs] == [1, 1]
    assert (tmp_path / "emergency").read_text().endswith("whole\n")


def test_a_node_that_comes_late_is_waited_for(port: int, tmp_path: Path) -> None:
    """The late node has more ranks than the first one; they are numbered after the first node's."""
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
    assert "waiting up to 300 s for node rank 1" in first.process.stderr.readline()
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


def test_a_missing_node_is_named_on_a_node_whose_own_limit_wait(port: int) -> None:
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
            checkin.check_in_until("127.0.0.1", port, early, secret, Wait(1.5))
        with pytest.raises(Refused, match=missing):
            gathered.result()


def test_a_master_that_is_not_there_is_named(port: int, tmp_path: Path) -> None:
    [err] = refused(port, tmp_path, ["--nnodes=2", "--node-rank=1"], timeout_s=10)
    waiting, verdict = err.splitlines()
    assert f"waiting up to 10 s for node rank 0 at 127.0.0.1:{port}" in waiting
    assert "did not answer within 10 s (Connection refused); start node rank 0" in verdict
    assert verdict.endswith("[node-missing]")


def test_a_master_without_an_address_is_named(port: int) -> None:
    second = NodeReport(1, 2, 1, "there", "", {}, {})
    with pytest.raises(Refused) as refused:
        checkin.check_in_until("no-such-host.invalid", port, second, SECRET.encode(), Wait(1))
    assert refused.value.fault == "name-unresolved"


def check_in(
    port: int, *agents: NodeReport, address: str = "127.0.0.1", **options: bool
) -> list[str]:
    """Have agents meet and try their connections; returns each one's node rank, or its error."""

    def meet(agent: NodeReport) -> str:
        try:
            access = Access(SECRET.encode())
            options.setdefault("tries_pairs", True)
            met = checkin.meet(address, port, agent, access, PATIENCE_S, **options)
            with met.starting_others():
                return str(met.assignment.node_rank)
        except Refused as refused:
            return str(refused)

    with ThreadPoolExecutor(len(agents)) as pool:
        return [*pool.map(meet, agents)]


def test_a_node_alone_uses_another_port_if_its_own_was_taken_after_the_preflight(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        assert check_in(port, replace(HERE, num_nodes=1)) == ["0"]
        assert check_in(port, HERE)[0].endswith("[port-in-use]")  # others look for it there


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


def test_a_node_rank_0_that_ends_while_data_arrives_is_not_taken_for_a_bad_link() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        first, _ = server.accept()
    connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            connection.send(bytes(1 << 16))
    assert meeting.is_busy(connection)
    first.close()  # with unread data, so the kernel resets the connection
    eventually(lambda: not meeting.is_busy(connection))


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
    told = "other has run id own, but here has run; "
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(check_in, port, HERE)
        refused = check_in(port, replace(THERE, host="other", run_id="own"))
        assert refused == [f"{told}do not set RUN_ID, or set one for all nodes [wrong-world]"]
        assert (check_in(port, THERE), first.result()) == (["1"], ["0"])
    assert f"warning: {told}rejected; still waiting for" in capsys.readouterr().err


TWICE = [replace(one, num_nodes=3) for one in (HERE, THERE, THERE)]
ARGUED = [replace(one, files={ARGUMENTS: one.host}) for one in (HERE, THERE)]


@pytest.mark.parametrize(
    ("agents", "fault", "cause"),
    [
        (TWICE, "duplicate-node-rank", "node rank 1 was started twice, on there and on there; "),
        ([HERE, replace(THERE, num_nodes=3)], "wrong-world", "started as node rank 1 of 3 nodes"),
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


def test_a_node_that_comes_after_a_refusal_by_hand_is_told_why(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other, late = (
        replace(HERE, node_rank=rank, num_nodes=3, versions={"torch": version})
        for rank, version in enumerate(("2.13", "2.14", "2.13"))
    )
    with ThreadPoolExecutor() as pool:
        began = time.monotonic()
        early = [pool.submit(check_in, port, one, is_by_hand=True) for one in (first, other)]
        assert early[1].result()[0].endswith("[version-mismatch]")
        assert check_in(port, late) == early[1].result() == early[0].result()
        assert time.monotonic() - began < limits.CHECKIN_LATE_S  # the last one has come
    assert "telling it for 15 s to nodes that come later" in capsys.readouterr().err


def test_a_program_at_the_port_that_never_answers_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("CHECKIN_CONNECT_S", "CHECKIN_REJECTED_S"):
        monkeypatch.setattr(limits, limit, 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        told = rf"127.0.0.1:{port} does not answer: another program has it, .* \[port-in-use\]"
        with pytest.raises(Refused, match=told):
            checkin.check_in_until("127.0.0.1", port, THERE, b"", Wait(0.5, print))


@pytest.mark.long
def test_a_node_that_comes_when_the_run_has_begun_is_told(start: Start, port: int) -> None:
    for run in start():
        run.wait_for("ready")
    late = start()[3]  # another node rank 1; another node rank 0 would find the port taken
    err = late.finish()
    assert late.process.returncode == 3
    assert "or the run has started" in err and "[port-in-use]" in err


def attempt_on(node_rank: int, folder: Path, **peers: Any) -> Attempt:
    """Return an attempt of a node whose ranks, 2 and 3, are no processes, with its `peers`."""
    streams = Mock(view=None, traceback_line=0, last_line=0, last_text="", recent_lines=[])
    streams.log.path = None
    ranks = [
        Rank(rank, rank - 2, 10 + rank, (streams, streams), folder / f"{rank}") for rank in (2, 3)
    ]
    return Attempt(
        NodeRanks(ranks, Heartbeats(2), node_rank, "here"),
        peers={int(name.removeprefix("node")): peer for name, peer in peers.items()},
        spares=list,
        supervisor=Mock(),
        earlier=(),
        facts=Facts(host="here", node_rank=node_rank),
        grace_s=30.0,
        is_last=False,
        query=Mock(hosts=["a", "b", "c"]),
        snapshots=Mock(parts=lambda: ({}, {})),
        on_beat=Mock(),
    )


def test_a_node_whose_ranks_exit_together_reports_its_end_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = Mock()
    attempt = attempt_on(1, tmp_path, node0=first)
    monkeypatch.setattr(processes, "reap", lambda: iter([(12, 0), (13, 0)]))
    for each in attempt.ranks.reap():
        attempt._on_death(each)
    ((told,),) = (call.args for call in first.send.call_args_list)
    assert isinstance(told, NodeEnd) and told.codes == [0, 0]


def test_to_ask_for_a_signals_handler_does_not_write_out_all_nodes(tmp_path: Path) -> None:
    attempt = attempt_on(0, tmp_path)
    before = signal.signal(signal.SIGUSR1, attempt._on_signal)
    attempt.peers = Mock(__repr__=Mock(side_effect=AssertionError))
    assert signal.getsignal(signal.SIGUSR1) == attempt._on_signal
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_node_that_waits_already_waits_longer_for_ranks_that_save(
    node_rank: int, tmp_path: Path
) -> None:
    other = Mock()
    attempt = attempt_on(node_rank, tmp_path, **{f"node{1 - node_rank}": other})
    attempt.is_last = True
    for each in attempt.ranks.all:
        each.code = 1
    attempt.facts.failures.append(Failure("rank-error", "", 1, "here", node_rank, time.time(), 2))
    assert not attempt._limit_wait()
    assert attempt.over.at < own_time.now() + 3 * limits.VERDICT_S
    attempts._handle_message(attempt, 1 - node_rank, other, RanksSave())
    assert not attempt._limit_wait()
    assert attempt.over.at > own_time.now() + attempt.grace_s


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
def test_after_a_notice_an_error_ends_the_ranks_of_all_nodes_at_once(
    signum: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "send", Mock())
    other = Mock()
    attempt = attempt_on(0, tmp_path, node1=other)
    attempt._request_stop(signum)
    attempt.facts.noticed.add((2, 0.0))
    attempt._fail(Failure("rank-error", "", 1, "here", 0, time.time(), 2))
    is_notice = signum == signal.SIGUSR1
    assert (EndRanks() in [call.args[0] for call in other.send.call_args_list]) == is_notice
    assert (attempt.term.at <= own_time.now()) == is_notice


# --- strangers at the ports of a run --------------------------------------------------------------


TEXTS = [
    '{"hello":{"node_rank":1,"num_nodes":2,"nproc":2,"host":"h","run_id":"","versions":{},"files":{}}}',
    '{"start":{"run_id":"../../x","first_rank":0,"world_size":2,"hosts":["a","b"]}}',
    '{"verdict":{"code":0,"failure":null}}',
    '{"signal":{"signum":15}}',
    '{"end":{"stuck":0}}',
    '{"done":{"stopped":[],"first_rank":0,"codes":[0]}}',
    '{"refused":{"fault":"x","message":"y"}}',
    '{"beat":{"straggler":null}}',
    "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "SSH-2.0-OpenSSH_9.2\r\n",
]
VALUES: list[Any] = [None, True, -1, 1e308, 10**30, "", "\x1b[2J", "x" * 1000, [], {}, [[[[]]]]]


def random_bytes(rng: random.Random, number: int) -> Iterator[bytes]:
    for _ in range(number):
        yield rng.randbytes(rng.choice((0, 1, 31, 32, 63, 64, 65, 96, 5000)))


def mutated_messages(rng: random.Random, number: int) -> Iterator[bytes]:
    for _ in range(number):
        text = rng.choice(TEXTS)
        kind = rng.randrange(4)
        if kind == 0 and text.startswith("{"):
            [(name, fields)] = json.loads(text).items()
            fields[rng.choice([*fields, "more"])] = rng.choice(VALUES)
            text = json.dumps({name: fields})
        data = bytearray(text.encode())
        if kind == 1:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[rng.randrange(len(data)) :]
        yield bytes(data) + b"\n" * rng.randrange(3)


def attack(port: int, rng: random.Random, times: int) -> None:
    """Send `times` byte sequences and `times` mutated messages, each over its own connection."""
    for data in (*random_bytes(rng, times), *mutated_messages(rng, times)):
        send(port, data)


def send(port: int, data: bytes) -> None:
    """Send data over a new connection."""
    dropped = contextlib.suppress(OSError)
    with socket.create_connection(("127.0.0.1", port)) as stranger, dropped:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)


def connect(port: int) -> socket.socket:
    """Return a connection, once a program is listening on the port."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def test_strangers_at_every_port_of_a_run_change_nothing(tmp_path: Path) -> None:
    attack_a_run(tmp_path, times=60, silent=300)


def attack_a_run(folder: Path, *, times: int, silent: int) -> None:
    """Attack a run of two nodes while it waits for the second node, and while it runs."""
    script = written(folder / "program.py", PROGRAM)
    port, rng = free_port(), random.Random(1)
    secret = handshake.new_secret()
    runs: list[Run] = []
    said: list[str] = []  # on stderr

    def begin(node: int, secret: str) -> Run:
        runs.append(Run([*world(port, node), str(script), "save", "0"], RUN_SECRET=secret))
        return runs[-1]

    try:
        first = begin(0, secret)
        reader = threading.Thread(target=lambda: said.extend(first.process.stderr or ()))
        reader.start()  # torch's store prints a stack for each message that it cannot read
        waiting = [connect(port) for _ in range(silent)]
        attack(port, rng, times)
        false = begin(1, handshake.new_secret())
        assert "has a different RUN_SECRET from this node" in false.finish()
        assert false.process.returncode == 3
        second = begin(1, secret)
        for run in (first, second):
            run.wait_for("armed")
        attack(port, rng, times)
        waiting += [connect(port) for _ in range(silent)]
        second.process.terminate()
        said.append(second.finish())
        assert first.process.wait(timeout=PATIENCE_S) == second.process.returncode == 75
        reader.join()
        assert first.process.stdout is not None
        assert "saved 0" in first.process.stdout.read() and "saved 1" in second.output
        assert "".join(said).count("[stranger]") == 1
        assert "Traceback" not in "".join(said)
        for connection in waiting:
            connection.close()
    finally:
        kill_what_is_left(runs)


STOLEN = [
    b'{"Failure":{"fault":"x","cause":"\\u001b[2J","code":0,"host":"h","node_rank":7,"time":0}}',
    b'{"Failure":{"fault":"x","cause":"\\u001b[2J","code":9,"host":"h","node_rank":7,"time":0}}',
    b'{"NodeEnd":{"stopped":[-1],"first_rank":1000000,"codes":[75,300]}}',
    b'{"NodeBeat":{"straggler":{"rank":99,"progress":[1,2],"is_stuck":true,"is_stopped":false}}}',
    b'{"Verdict":{"code":0}}\n{"EndRanks":{"stuck":1}}',
    b'{"StopRequest":{"signum":9}}\n{"StopRequest":{"signum":64}}',
    b'{"Assignment":{"run_id":"../../x","first_rank":0,"world_size":2,"hosts":[],'
    b'"attempt":0,"address":"","port":0,"members":[],"spares":[]}}',
    b'{"Failure":{"fault":1,"cause":null}}',
    b'{"Failure":{"fault":"x","cause":"c","code":9,"host":"h","node_rank":0,"time":1e400}}',
    b'{"NodeBeat":{"straggler":{"rank":1e999,"progress":[]}}}',
    b'{"NodeReport":{}}\nnull\n[]',
    b"\x00" * 100,
    b"[" * 100_000,
    b"\xff" * 2_000_000,
]
RARER = rarely(*(one for number, one in enumerate(STOLEN) if number % 10))


@pytest.mark.parametrize(
    "message", [*STOLEN[::10], *RARER], ids=lambda message: message[:12].decode("latin1")
)
def test_a_stolen_node_can_only_end_the_run(
    runs: list[Run], tmp_path: Path, message: bytes
) -> None:
    """The node knows the secret, but sends invalid messages: no traceback, and no code 0."""
    script = written(tmp_path / "program.py", "import time\ntime.sleep(600)\n")
    port, secret = free_port(), handshake.new_secret()
    runs.append(run := Run([*world(port, 0), str(script)], RUN_SECRET=secret))
    with connect(port) as stolen:
        handshake.introduce(stolen, secret.encode())
        stolen.sendall(hello(script) + b'{"PairResult":{"faults":[]}}\n')
        read_until(stolen, b'"Assignment"')
        stolen.sendall(message + b"\n")
        with contextlib.suppress(OSError):  # the end of the connection ends the run
            stolen.shutdown(socket.SHUT_WR)
            while stolen.recv(65536):
                pass
    err = run.finish()
    run.assert_gone()
    assert "FAILED   " in err and "Traceback" not in err and "\x1b" not in err
    assert run.process.returncode not in (0, 1)


LEAVES_SLOWLY = """
import atexit, signal, sys, time

def leave(*_):
    print("leaving", flush=True)
    sys.exit(143)

signal.signal(signal.SIGTERM, leave)
atexit.register(time.sleep, 0.8)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_rank_that_was_told_to_stop_is_no_cause(runs: list[Run], tmp_path: Path) -> None:
    """Failures that arrive later, as those of a large run do, tell nobody to stop again."""
    script = written(tmp_path / "program.py", LEAVES_SLOWLY)
    port, secret = free_port(), handshake.new_secret()
    runs.append(run := Run([*world(port, 0, nproc=1), str(script)], RUN_SECRET=secret))
    with connect(port) as other:
        handshake.introduce(other, secret.encode())
        other.sendall(hello(script, nproc=8) + b'{"PairResult":{"faults":[]}}\n')
        run.wait_for("ready")
        for rank in (1, 2, 3):
            lost = Failure("rank-error", "lost", 9, "x", 1, rank, rank, is_consequence=True)
            other.sendall(f"{messages.write(lost)}\n".encode())
            run.wait_for("leaving")
        ends = [143] * 8
        other.sendall(f"{messages.write(NodeEnd([*range(1, 9)], 1, ends))}\n".encode())
        said = b""
        while more := other.recv(65536):
            said += more
    err = run.finish()
    assert "FAILED   rank 1 (" in err and run.process.returncode == 9, err
    assert said.count(b'"EndRanks"') == 1


def test_a_stop_before_the_ranks_have_started_reaches_all_nodes(
    runs: list[Run], tmp_path: Path
) -> None:
    script = written(tmp_path / "program.py", "import time\ntime.sleep(600)\n")
    port, secret = free_port(), handshake.new_secret()
    runs.append(run := Run([*world(port, 0), str(script)], RUN_SECRET=secret))
    with connect(port) as other:
        handshake.introduce(other, secret.encode())
        other.sendall(hello(script) + b'{"PairResult":{"faults":[]}}\n')
        read_until(other, b'"Assignment"')
        run.process.terminate()
        read_until(other, b'"StopRequest"')
        other.sendall(f"{messages.write(NodeEnd((), 1, [143]))}\n".encode())
        while other.recv(65536):
            pass
    assert "stopped  by SIGTERM: ranks 0-1 ended by SIGTERM (code 143)" in run.finish()


def read_until(connection: socket.socket, text: bytes) -> None:
    """Read what node rank 0 sends, until this text has come."""
    said = b""
    while text not in said:
        said += (more := connection.recv(65536))
        assert more, said


def hello(script: Path, nproc: int = 1) -> bytes:
    """Return a node's first message, with the versions and hashes that node rank 0 expects."""
    files = {"the list of arguments": "", **must_match.hash_files([str(script)], Path())}
    report = NodeReport(1, 2, nproc, "stolen", "", versions(), files)
    return f"{messages.write(report)}\n".encode()
