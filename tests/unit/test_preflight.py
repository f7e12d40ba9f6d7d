"""The preflight of a node: what it reports, and how the report travels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import ROOT, execute
from ports import free_port
from test_compare import BLOCKED, make_report

from distributed.errors import Refused
from launcher.agent import join
from launcher.agent.nodes import checkin
from launcher.agent.torchrun_arguments import parse
from launcher.preflight.check_node import MARK, check_node, read_reports
from launcher.preflight.compare import judge
from launcher.preflight.must_match import ARGUMENTS, describe_program
from launcher.typed_json import encode
from launcher.wire.launcher_link import tell
from launcher.wire.messages import NodeReport, Request


def make_request(folder: Path, **changes: Any) -> Request:
    words, logs = [str(ROOT / "train.py")], Path("logs")
    request = Request("x", 1, 0, None, 2, "127.0.0.1", None, words, folder, logs, None)
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
    """Start one of three nodes that are all this machine."""
    request = make_request(folder, num_nodes=3, meeting_size=3, port=port, words=words)
    return subprocess.Popen(
        [sys.executable, "scripts/lib/start.py", "launcher.preflight.check_node", encode(request)],
        cwd=ROOT,
        env={**os.environ, "SLURM_NODEID": str(node_rank)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_nodes_that_match_meet_and_pass(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")
    port = free_port()
    words = ["own.py", "x" * 300, " a  b ", "--flag"]
    nodes = [start_node(tmp_path, rank, port, *words) for rank in (2, 1, 0)]
    said = "".join(node.communicate()[0] for node in nodes).encode()
    assert [node.returncode for node in nodes] == [0, 0, 0]
    outcome = judge(read_reports(said))
    assert (outcome.num_checks, outcome.num_nodes) == (29, 3)
    assert all(one.fault.warns for one in outcome.findings)
    names = [one.fault.name for one in outcome.findings]
    assert names.count("loopback-address") == 3  # a warning, for 127.0.0.1 may be meant


def test_reports_are_found_among_other_lines(capfd: pytest.CaptureFixture[str]) -> None:
    reports = [make_report(rank, faults=[], met=[BLOCKED], done=[]) for rank in range(2)]
    for report in reversed(reports):
        tell(f"{MARK}.{report.node_rank}", report)
    told = capfd.readouterr().out.encode()
    assert read_reports(b"srun: a warning\n" + told) == reports
    assert read_reports(told[:-5]) == reports[1:]
    assert read_reports(b'\x02node.1 {"Report":{"node_rank":"1"}}\n') == []


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
    assert {*told} == {"this project", "own.py", "my.yaml"}  # the task's module
    other = [str(script), "--config", "other.yaml"]
    one, two = (describe_program(each, "", skips_arguments=True) for each in (words, other))
    assert one == two


@pytest.mark.parametrize(
    ("is_by_hand", "skipped", "compares"),
    [(True, "", True), (True, "1", True), (False, "", False), (False, "1", True)],
)
def test_what_a_preflight_has_compared_is_not_compared_again(
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
        join.join(args, is_by_hand=is_by_hand)
    (report,) = told
    assert ("this project" in report.files) == ("torch" in report.versions) == compares
