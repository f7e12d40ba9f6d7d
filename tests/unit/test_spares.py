"""Spare nodes: agents on loopback that lose nodes, including node rank 0, and continue."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from agents import PATIENCE_S, Run, eventually, world, written
from ports import free_port

from launcher.agent.nodes.team import Team
from launcher.failure import Failure
from launcher.outcome import Outcome
from launcher.wire import messages
from launcher.wire.messages import Member, Verdict
from launcher.wire.node_link import Link

# Every rank records its place, and trains forever, or exits in the given attempt.
PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
attempt, node = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["GROUP_RANK"]
dist.barrier()
where = f"rank {dist.get_rank()} of {dist.get_world_size()} node {node}"
with open(f"{sys.argv[3]}/{attempt}.{dist.get_rank()}", "w") as file:
    file.write(where)
dist.barrier()
while attempt != sys.argv[1]:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
sys.exit(int(sys.argv[2]))
"""
Start = Callable[..., list[Run]]


@pytest.fixture
def start(tmp_path: Path, runs: list[Run]) -> Start:
    script = written(tmp_path / "program.py", PROGRAM)

    def begin(nodes: int, spares: int, ends: str, code: int = 0, **environment: str) -> list[Run]:
        """Start nodes with two ranks each, which exit with this code in the attempt `ends`."""
        port = free_port()
        variables = {"SPARES": str(spares), "MIN_NODES": str(nodes), **environment}
        for place in range(nodes + spares):
            words = [*world(port, place, nodes=nodes, nproc=2), "--max-restarts=2"]
            words.append(f"--log-dir={tmp_path / 'logs'}")
            variables["LAUNCH_TOKEN"] = f"{port}.{place}"
            words += [str(script), ends, str(code), str(tmp_path)]
            runs.append(Run(words, **variables))
        return runs

    return begin


def finish(runs: list[Run], code: int) -> list[str]:
    """Wait until all exit; returns each agent's output."""
    told = [run.finish() for run in runs]
    for run, text in zip(runs, told, strict=True):
        run.assert_gone()
        assert run.process.returncode == code, text
    return told


def seen(folder: Path, attempt: int) -> list[str]:
    """Return what the ranks of an attempt recorded."""
    return sorted(file.read_text() for file in folder.glob(f"{attempt}.*"))


def ready(folder: Path, world_size: int, attempt: int = 0) -> None:
    """Wait until all ranks of an attempt have met."""
    eventually(lambda: len(list(filter(None, seen(folder, attempt)))) == world_size)


def lose(run: Run) -> None:
    run.look()
    os.kill(run.agent_pid(), signal.SIGKILL)


FOUR = [f"rank {rank} of 4 node {rank // 2}" for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_spare_takes_the_place_of_a_node_whose_agent_is_gone(
    tmp_path: Path, start: Start, lost: int
) -> None:
    runs = start(2, 1, "1")
    ready(tmp_path, 4)
    maps = Path(f"/proc/{runs[2].agent_pid()}/maps").read_text()
    assert "libtorch_python" in maps and runs[2].rank_pids() == []  # it is waiting
    lose(runs[lost])
    assert runs[lost].process.wait(PATIENCE_S) == 137
    others = [run for place, run in enumerate(runs) if place != lost]
    told = finish(others, 0)
    assert seen(tmp_path, 1) == FOUR
    host = socket.gethostname()
    new_first = told[1 if lost == 0 else 0]
    line = f"restart 1 of 2 after node agent {lost} ({host}): its node agent is gone; "
    assert f"{line}{host} replaces {host}" in new_first


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=pytest.mark.long)])
def test_without_a_spare_fewer_nodes_go_on(tmp_path: Path, start: Start, lost: int) -> None:
    runs = start(3, 0, "1", MIN_NODES="2")
    ready(tmp_path, 6)
    lose(runs[lost])
    others = [run for place, run in enumerate(runs) if place != lost]
    told = finish(others, 0)
    assert seen(tmp_path, 1) == FOUR
    assert "; continuing on 2 nodes, without " in told[0]


@pytest.mark.slow
def test_without_min_nodes_the_loss_of_node_rank_0_ends_the_run_and_is_named(
    tmp_path: Path, start: Start
) -> None:
    runs = start(2, 0, "1", MIN_NODES="")
    ready(tmp_path, 4)
    lose(runs[0])
    [told] = finish(runs[1:], 137)
    assert "FAILED   node agent 0 (" in told and "Traceback" not in told


# --- assignments --------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def team_of(server: socket.socket, nprocs: list[int], spares: list[int], min_nodes: int) -> Team:
    members = [Member(at, f"n{at}", nproc) for at, nproc in enumerate([*nprocs, *spares])]
    peers = [Link(socket.create_connection(server.getsockname())) for _ in members[1:]]
    others = dict(enumerate(peers[: len(nprocs) - 1], 1))
    there = dict(zip(members[len(nprocs) :], peers[len(others) :], strict=True))
    return Team("r", members[: len(nprocs)], others, there, min_nodes)


ALONE = "stopping: this node reaches only 0 of 3 other agents"


@pytest.mark.parametrize(
    ("nprocs", "spares", "min_nodes", "lost", "why", "told", "hosts", "world_size"),
    [
        ([2, 2, 2], [2], 3, [1], "", ["n3 replaces n1"], ["n0", "n3", "n2"], 6),
        ([2, 2, 2], [2], 3, [1, 2], "not restarting: no spare is left for n1, n2", [], [], 0),
        ([2, 2, 2, 2], [2, 2], 4, [1, 3], "",
         ["n4 replaces n1", "n5 replaces n3"], ["n0", "n4", "n2", "n5"], 8),
        ([2, 4, 2], [2, 4], 3, [1], "", ["n4 replaces n1"], ["n0", "n4", "n2"], 8),
        ([2, 4, 2], [2], 3, [1], "not restarting: no spare is left for n1", [], [], 0),
        ([2, 4, 2], [2], 2, [1], "", ["continuing on 2 nodes, without n1"], ["n0", "n2"], 4),
        ([2, 2, 2, 2], [], 2, [1, 2, 3], ALONE, [], [], 0),
        ([2, 2], [], 1, [1], "", ["continuing on 1 node, without n1"], ["n0"], 2),
        ([2, 2], [], 0, [1], "not restarting: a node's agent is gone", [], [], 0),
    ],
)  # fmt: skip
def test_who_takes_whose_place(
    server: socket.socket,
    nprocs: list[int],
    spares: list[int],
    min_nodes: int,
    lost: list[int],
    why: str,
    told: list[str],
    hosts: list[str],
    world_size: int,
) -> None:
    team = team_of(server, nprocs, spares, min_nodes)
    for node_rank in lost:
        team.part_with([node_rank])
    assert team.why_stop() == why
    if why:
        return
    assert team.refill() == told
    parts = team.assign(1, "10.0.0.1", 99)
    assert [*parts[0].hosts] == hosts and parts[0].world_size == world_size
    in_order = [parts[one.node_id] for one in team.members]
    assert [part.node_rank for part in in_order] == [*range(len(hosts))]
    assert sorted(team.peers) == [*range(1, len(hosts))]
    firsts = [part.first_rank for part in in_order]
    counts = [team.members[rank].nproc for rank in range(len(hosts))]
    assert firsts == [sum(counts[:rank]) for rank in range(len(hosts))]
    assert {part.attempt for part in parts.values()} == {1}


def test_a_verdict_that_may_name_every_rank_is_written_once(
    monkeypatch: pytest.MonkeyPatch, server: socket.socket
) -> None:
    write = Mock(wraps=messages.write)
    monkeypatch.setattr(messages, "write", write)
    team = team_of(server, [2, 2, 2], [2], 3)
    first = Failure("stuck", "", 1, "n1", 1, 0.0, 2, frames=[], stacks={"at": [0, 1]})
    verdict = Verdict(Outcome(1, first))
    team.send_assignments({}, verdict)
    assert write.call_count == 1
    for _ in range(3):
        with server.accept()[0] as end:
            assert Link(end).receive() == [verdict]


def test_a_spare_that_is_gone_is_told_and_counts_no_more(server: socket.socket) -> None:
    team, told = team_of(server, [2, 2], [2, 2], 2), list[Failure]()
    ends = [server.accept()[0] for _ in range(3)]
    team.check_spares(told.append)
    assert (told, [spare.host for spare in team.spares], team.counted) == ([], ["n2", "n3"], 4)
    ends[2].close()
    team.check_spares(told.append)
    assert [(loss.fault, loss.host) for loss in told] == [("agent-killed", "n3")]
    assert ([spare.host for spare in team.spares], team.counted) == (["n2"], 3)
    (silent,) = team.spares.values()
    silent.silence_s = 0.0
    team.check_spares(told.append)
    assert [(loss.fault, loss.host) for loss in told[1:]] == [("link-lost", "n2")]
    assert (team.spares, team.counted) == ({}, 3)
