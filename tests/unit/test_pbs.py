"""What a PBS job was given, from texts of a real OpenPBS; tests/cluster/pbs/ has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_tools import make_tool

from launcher.plan import make_plan, pbs
from launcher.plan.plan import NodePlan
from launcher.plan.typed import Typed

CAPTURED = Path(__file__).resolve().parents[1] / "cluster/pbs"


def requests() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the job, the request and the node file of each captured job."""
    text = (CAPTURED / "nodefiles.txt").read_text()
    for request, job, lines in re.findall(r"^qsub (.*?) *-> (\d+)\.head\n.*\n(.*)\n", text, re.M):
        yield job, request, lines.split()


def ranks_of(select: str, lines: str | list[str]) -> tuple[dict[str, int], bool]:
    lines = lines.split() if isinstance(lines, str) else lines
    return pbs.count_ranks(lines, pbs.read_chunks({"schedselect": select}))


@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        ("47", {"node1": 4, "node2": 1, "node3": 1}),  # one line among several is one rank
        ("48", {"node1": 2}),
        ("49", {"node1": 1, "node2": 1}),
        ("50", {"node1": 8}),
        ("52", {}),
        ("53", {}),
        ("54", {"node1": 2, "node2": 2}),
        ("56", {}),
    ],
)
def test_the_ranks_of_captured_requests(job: str, ranks: dict[str, int]) -> None:
    [(request, lines)] = [(request, lines) for one, request, lines in requests() if one == job]
    select = re.search(r"select=(\S+)", request)
    assert ranks_of(select[1] if select else "", lines)[0] == ranks


@pytest.mark.parametrize(
    ("select", "lines", "ranks", "is_chosen"),
    [
        ("2:ncpus=16:ngpus=4", "n1 n1", {"n1": 8}, True),  # packed
        ("2:ncpus=16:ngpus=4", "n1 n2", {"n1": 4, "n2": 4}, True),  # scattered
        ("3:ngpus=2", "n1 n1 n2", {"n1": 4, "n2": 2}, True),
        ("2:ncpus=8:mpiprocs=1:ngpus=4", "n1 n2", {"n1": 4, "n2": 4}, True),
        ("1:ncpus=1+2:ncpus=8:ngpus=4", "n0 n1 n2", {"n0": 1, "n1": 4, "n2": 4}, True),
        ("2:mpiprocs=2:ngpus=4", "n1 n1 n2 n2", {"n1": 2, "n2": 2}, True),  # the user's choice
        ("ngpus=4", "n1", {"n1": 4}, True),
        ("2:ncpus=16", "n1 n1", {"n1": 2}, False),
        ("2:ngpus=4", "n1 n1 n2", {"n1": 2, "n2": 1}, False),  # not the request of these lines
        ("", "n1 n1", {"n1": 2}, False),
        ("", "n1 n2", {}, False),
    ],
)
def test_the_ranks_of_chunks(
    select: str, lines: str, ranks: dict[str, int], is_chosen: bool
) -> None:
    assert ranks_of(select, lines) == (ranks, is_chosen)


def test_run_ddp_in_a_job_of_one_node_takes_what_the_job_was_given(
    tools: Path, tmp_path: Path
) -> None:
    make_tool(tools / "qstat", "echo '  schedselect = 1:ncpus=16:ngpus=4'")
    (tmp_path / "nodes").write_text("n1\n")
    environ = {"PBS_JOBID": "7.host", "PBS_NODEFILE": str(tmp_path / "nodes")}
    no_job = {"PBS_JOBID": ""}
    for fanout, more, nproc in [
        ("auto", {}, 4),
        ("auto", {"NPROC_PER_NODE": "2"}, 2),
        ("auto", no_job, None),
        ("local", {}, None),
    ]:
        typed = Typed(fanout, typed=("run_ddp.sh",))
        assert make_plan.read_world(typed, {**environ, **more}, "local").nproc == nproc


def test_what_qstat_tells(tools: Path) -> None:
    make_tool(tools / "qstat", f'[[ $* == "-f 1.head" ]] && cat {CAPTURED}/qstat-f-running.txt')
    told = pbs.ask_qstat("1.head")
    assert told["Resource_List.select"] == "2:ncpus=2:mpiprocs=2"
    assert told["Variable_List"].endswith("RUN_ID=,X=1,PBS_O_QUEUE=workq,PBS_O_HOST=head")
    assert pbs.read_chunks(told) == [{"ncpus": "2", "mpiprocs": "2"}] * 2
    assert pbs.ask_qstat("2.head") == {}


@pytest.mark.parametrize(
    ("qstat", "nproc", "node"),
    [
        ("echo '  schedselect = 2:ngpus=4'", None, NodePlan("n1", 8)),
        ("echo '  schedselect = 2:ngpus=4'", 3, NodePlan("n1", 3)),
        ("exit 1", None, NodePlan("n1", 2, is_by_lines=True)),
    ],
)
def test_the_nodes_of_a_job(
    tools: Path, tmp_path: Path, qstat: str, nproc: int | None, node: NodePlan
) -> None:
    make_tool(tools / "qstat", qstat)
    (tmp_path / "nodes").write_text("n1\nn1\n")
    environ = {"PBS_JOBID": "7.host", "PBS_NODEFILE": str(tmp_path / "nodes")}
    assert pbs.read_nodefile(environ, nproc) == (node,)
