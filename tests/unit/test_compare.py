"""What several nodes found, together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from launcher.preflight import compare
from launcher.preflight.compare import judge
from launcher.wire.messages import Fault, Report

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
        ([{}, {"versions": {"python": "3.11", "torch": ""}}], []),  # which it reports itself
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
    assert [one.fault.name for one in compare.differences(reports)] == found


def test_no_word_of_the_port_of_a_node_that_gave_no_report() -> None:
    files = {"own.py": "aa", "my.yaml": "cc"}
    outcome = judge([make_report(2, met=[BLOCKED], files=files), make_report(1)])
    assert [(one.host, one.fault.name) for one in outcome.findings] == [("node3", "code-mismatch")]
