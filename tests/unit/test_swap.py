"""Nodes that are swapped for spares before the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_ending import PLAN

from launcher.fanout.swap import find_ill, leave_out, swap
from launcher.plan.plan import NodePlan
from launcher.preflight.check_node import Report
from launcher.preflight.checks import Fault
from launcher.record import run_json
from launcher.record.restart import Restart

NODES = [NodePlan(f"me@n{number}", 2) for number in range(5)]
FIVE = replace(PLAN, nodes=NODES, num_nodes=3, num_spares=2, min_nodes=3, master_addr="n0")
ILL = Fault("gpu-unhealthy", "an Xid error", "reset it")
SLOW = Fault("gpu-slow", "throttled", "cool it", warns=True)


def report(number: int, *faults: Fault) -> Report:
    return Report(number, 5, 2, f"n{number}", "r", {}, {}, faults=faults)


def test_a_node_is_ill_that_does_not_answer_has_a_fault_or_was_lost_twice(tmp_path: Path) -> None:
    plan = replace(FIVE, log_dir=tmp_path)
    reports = [report(0, SLOW), report(1, ILL), None, report(3), report(4)]
    assert find_ill(plan, reports) == {1, 2}
    assert find_ill(replace(plan, is_strict=True), reports) == {0, 1, 2}
    lost = [("n3.cluster", "n4"), ("n3.cluster",)]
    restarts = [
        Restart(number, "link-lost", "x", "y", -1, -1, 0.0, lost=hosts)
        for number, hosts in enumerate(lost, 1)
    ]
    run_json.update(tmp_path / plan.run_id, restarts=restarts)
    assert find_ill(plan, reports) == {1, 2, 3}


@pytest.mark.parametrize(
    ("ill", "names", "told"),
    [
        ({1}, "n0 n3 n2 n4", "me@n3 takes me@n1's place"),
        ({0, 2}, "n3 n1 n4", "me@n3 takes me@n0's place; me@n4 takes me@n2's place"),
        ({1, 3}, "n0 n4 n2", "me@n3 is no spare; me@n4 takes me@n1's place"),
        ({4}, "n0 n1 n2 n3", "me@n4 is no spare"),
        ({0, 1, 2}, None, ""),
    ],
)
def test_spares_take_the_places_of_ill_nodes(ill: set[int], names: str | None, told: str) -> None:
    found = swap(FIVE, ill)
    assert (found is None) == (names is None)
    if found is not None and names is not None:
        plan, lines = found
        assert [node.name for node in plan.nodes] == [f"me@{name}" for name in names.split()]
        assert (plan.num_nodes, plan.num_agents) == (3, len(plan.nodes))
        assert plan.master_addr == names.split()[0]
        assert "; ".join(lines) == told


@pytest.mark.parametrize(
    ("ill", "hosts", "told"),
    [
        ({1}, "n0,n2,n3,n4", "n3 takes n1's place"),
        ({0, 2}, "n1,n3,n4", "n3 takes n0's place; n4 takes n2's place"),
        ({1, 3}, "n0,n2,n4", "n3 is no spare; n4 takes n1's place"),
        ({4}, "n0,n1,n2,n3", "n4 is no spare"),
        ({0, 1, 2}, None, ""),
        (set(), None, ""),
    ],
)
def test_a_slurm_job_leaves_ill_nodes_out(ill: set[int], hosts: str | None, told: str) -> None:
    found = leave_out(replace(FIVE, nodes=(), hosts="n[0-4]"), ill)
    assert (found is None) == (hosts is None)
    if found is not None and hosts is not None:
        plan, lines = found
        assert (plan.hosts, plan.master_addr) == (hosts, hosts.split(",")[0])
        assert plan.left_out == [f"n{number}" for number in sorted(ill)]
        assert (plan.num_nodes, plan.num_agents) == (3, len(hosts.split(",")))
        assert "; ".join(lines) == told


def test_a_master_that_was_named_is_not_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert swap(FIVE, {0}) is None
    assert swap(FIVE, {1}) is not None
    assert leave_out(replace(FIVE, nodes=(), hosts="n[0-4]"), {0}) is None
