"""The preflight of a node: what it reports, and how the report travels."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from test_compare import BLOCKED, make_report

from launcher.preflight.check_node import Report, check_node, read_reports, write_report
from launcher.preflight.compare import Finding, Preflight, judge
from launcher.typed_json import MessageError, encode
from launcher.wire.messages import Request

ROOT = Path(__file__).resolve().parents[2]


def make_request(folder: Path, **changes: Any) -> Request:
    values: dict[str, Any] = {
        "run_id": "x",
        "num_nodes": 1,
        "node_rank": 0,
        "nproc": None,
        "cpu_nproc": 2,
        "master_addr": "127.0.0.1",
        "port": None,
        "words": [str(ROOT / "train.py")],
        "directory": folder,
        "log_dir": Path("logs"),
        "checkpoint_dir": None,
    }
    return Request(**{**values, **changes})


def test_what_the_plan_must_know(tmp_path: Path) -> None:
    report = check_node(make_request(tmp_path), {"CUDA_VISIBLE_DEVICES": ""})
    assert (report.gpus, report.nproc, report.node_rank) == (0, 2, 0)
    assert 10_000 <= report.port < 32_768
    assert check_node(make_request(tmp_path, nproc=3, port=4000)).nproc == 3
    assert list(tmp_path.iterdir()) == []


def test_without_checks_there_are_no_faults(tmp_path: Path) -> None:
    request = make_request(tmp_path, words=["none.py"])
    assert [fault.name for fault in check_node(request).faults if not fault.warns] == [
        "env-missing"
    ]
    assert check_node(make_request(tmp_path, words=["none.py"], has_checks=False)).faults == []


# --- several nodes ------------------------------------------------------------------------------


def start_node(
    folder: Path, node_rank: int, port: int, *words: str, python: Sequence[str] = (sys.executable,)
) -> subprocess.Popen[str]:
    """Start one of three nodes that are all this machine."""
    place = {"num_nodes": 3, "meeting_size": 3, "port": port, "words": words}
    request = make_request(folder, **place)
    return subprocess.Popen(
        [*python, "scripts/lib/start.py", "launcher.preflight.check_node", encode(request)],
        cwd=ROOT,
        env={**os.environ, "SLURM_NODEID": str(node_rank)},
        stdout=subprocess.PIPE,
        text=True,
    )


def reports_of(nodes: Sequence[subprocess.Popen[str]]) -> list[Report]:
    said = [line for node in nodes for line in node.communicate()[0].splitlines()]
    assert [node.returncode for node in nodes] == [0] * len(nodes)
    return read_reports(said)


def refusals_of(outcome: Preflight) -> list[Finding]:
    return [one for one in outcome.findings if not one.fault.warns]


def test_nodes_that_match_meet_and_pass(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")
    port = free_port()
    words = ["own.py", "x" * 300, " a  b ", "--flag"]
    reports = reports_of([start_node(tmp_path, rank, port, *words) for rank in (2, 1, 0)])
    outcome = judge(reports)
    assert not refusals_of(outcome)
    assert (outcome.num_checks, outcome.num_nodes) == (29, 3)
    loopback = [one for one in outcome.findings if one.fault.name == "loopback-address"]
    assert len(loopback) == 3  # a warning, for 127.0.0.1 may be meant


def test_each_nodes_own_files_and_torch_are_compared(tmp_path: Path) -> None:
    port = free_port()
    nodes = []
    for rank, python in enumerate([(sys.executable,), (sys.executable, "-S"), (sys.executable,)]):
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / "my.yaml").write_text(f"seed: {rank // 2}")
        if rank != 2:
            (folder / "own.py").write_text(f"seed = {rank}")
        words = ["own.py", "--config", "my.yaml"]
        nodes.append(start_node(folder, rank, port, *words, python=python))
    refusals = refusals_of(judge(reports_of(nodes)))
    names = [one.fault.name for one in refusals]
    assert names == ["env-missing", "env-missing", "code-mismatch", "code-mismatch"]
    host = socket.gethostname().partition(".")[0]
    for finding, file, rank in zip(refusals[2:], ("own.py", "my.yaml"), (1, 2), strict=True):
        assert finding.fault.cause.startswith(f"{file} is ")
        assert f" on node rank 0 ({host}) and " in finding.fault.cause
        assert finding.fault.cause.endswith(f" on node rank {rank} ({host})")


def test_reports_arrive_in_pieces_and_mixed() -> None:
    long = {f"file {number} .yaml": "ab" * 6 for number in range(100)}
    reports = [
        make_report(rank, files=long, faults=[], met=[BLOCKED], done=[]) for rank in range(2)
    ]
    first, second = (list(write_report(report)) for report in reports)
    assert max(map(len, [*first, *second])) < 1024  # so much srun keeps together
    mixed = [line for pair in zip(second, first, strict=True) for line in pair]
    assert read_reports(["srun: a warning", *mixed]) == reports


def test_what_is_no_report_is_refused() -> None:
    (line,) = write_report(make_report(1))
    with pytest.raises(MessageError):
        read_reports([line[:-5]])
    with pytest.raises(MessageError):
        read_reports(['node=1 {"node_rank":"1"}'])


def test_no_torch_is_imported() -> None:
    code = "import sys, launcher.preflight.check_node as it; it.must_match.versions()"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
