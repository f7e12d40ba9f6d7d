"""Nodes that are swapped for spares before the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_ending import PLAN

from launcher.fanout.swap import find_ill, leave_out, swap
from launcher.plan.plan import NodePlan
from launcher.preflight.check_node import Report
from launcher.record import run_json
from launcher.record.restart import Restart
from launcher.wire.messages import Fault

NODES = [NodePlan(f"me@n{number}", 2) for number in range(5)]
FIVE = replace(PLAN, nodes=NODES, num_nodes=3, num_spares=2, min_nodes=3, master_addr="n0")
NAMED = replace(FIVE, master_addr="10.0.0.1")
IN_SLURM = replace(FIVE, nodes=(), hosts="n[0-4]")
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
    ("ill", "over_ssh", "in_slurm", "told"),
    [
        ({1}, "n0 n3 n2 n4", "n0,n2,n3,n4", "n3 takes n1's place"),
        ({0, 2}, "n3 n1 n4", "n1,n3,n4", "n3 takes n0's place; n4 takes n2's place"),
        ({1, 3}, "n0 n4 n2", "n0,n2,n4", "n3 is no spare; n4 takes n1's place"),
        ({4}, "n0 n1 n2 n3", "n0,n1,n2,n3", "n4 is no spare"),
        ({0, 1, 2}, "", "", ""),
    ],
)
def test_spares_take_the_places_of_ill_nodes(
    ill: set[int], over_ssh: str, in_slurm: str, told: str
) -> None:
    swapped, left_out = swap(FIVE, ill), leave_out(IN_SLURM, ill)
    assert (swapped is None) == (left_out is None) == (told == "")
    if swapped is not None and left_out is not None:
        (plan, lines), (job, its_lines) = swapped, left_out
        assert " ".join(node.name for node in plan.nodes).replace("me@", "") == over_ssh
        assert (job.hosts, job.left_out) == (in_slurm, [f"n{one}" for one in sorted(ill)])
        assert (plan.master_addr, job.master_addr) == (over_ssh[:2], in_slurm[:2])
        for each, number in ((plan, len(plan.nodes)), (job, len(in_slurm.split(",")))):
            assert (each.num_nodes, each.num_agents) == (3, number)
        assert "; ".join(lines).replace("me@", "") == "; ".join(its_lines) == told


def test_a_slurm_job_without_ill_nodes_stays() -> None:
    assert leave_out(IN_SLURM, set()) is None


def test_a_master_that_was_named_is_not_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert swap(FIVE, {0}) is None
    assert leave_out(IN_SLURM, {0}) is None
    for swapped in (swap(NAMED, {1}), leave_out(replace(NAMED, nodes=(), hosts="n[0-4]"), {1})):
        assert swapped is not None and swapped[0].master_addr == "10.0.0.1"
