"""What the nodes' preflights found, together: every fault in one list, and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from launcher.preflight.checks import CHECKS
from launcher.preflight.must_match import mismatches
from launcher.wire.messages import Fault, Report

COMPARED = 2  # versions and files; the rest is done at the master's port


@dataclass(frozen=True)
class Finding:
    """A fault, and the host that has it."""

    host: str
    fault: Fault


@dataclass(frozen=True)
class Preflight:
    """What the preflight says of all nodes."""

    num_checks: int
    findings: Sequence[Finding]
    num_nodes: int
    seconds: float


def judge(reports: Sequence[Report], seconds: float | None = None) -> Preflight:
    """Return all faults by node rank, and after them what differs between nodes."""
    by_rank = sorted(reports, key=lambda report: report.node_rank)
    findings = [Finding(report.host, fault) for report in by_rank for fault in report.faults]
    num_checks = sum(CHECKS.values())
    if len(by_rank) > 1:
        findings += differences(by_rank)
        num_checks += COMPARED + len(set.intersection(*({*report.done} for report in by_rank[1:])))
    took = max(report.seconds for report in reports) if seconds is None else seconds
    return Preflight(num_checks, findings, len(by_rank), took)


def differences(reports: Sequence[Report]) -> Iterator[Finding]:
    """Yield what a node has otherwise than the first, or that it cannot reach node rank 0."""
    first, *others = reports
    names = {fault.name for fault in first.faults}
    is_master_there = first.node_rank == 0 and not names & {"port-in-use", "run-is-live"}
    if is_master_there:
        yield from (Finding(first.host, fault) for fault in first.met)
    for report in others:
        for name, cause in mismatches(first, report):
            yield Finding(report.host, Fault(name, cause, "make them the same"))
        # Where the master's name means that node itself, it has called at its own ports.
        is_own = any(
            fault.name == "loopback-address" and not fault.warns for fault in report.faults
        )
        if is_master_there and not is_own:
            yield from (Finding(report.host, fault) for fault in report.met)


def print_findings(preflight: Preflight, program: str, *, is_strict: bool, out: TextIO) -> bool:
    """Print one line for each fault; returns whether one refuses the start.

    With `is_strict`, every warning refuses it.
    """
    refusing = [finding for finding in preflight.findings if is_strict or not finding.fault.warns]
    for finding in preflight.findings:
        fault, kind = finding.fault, "" if finding in refusing else "warning: "
        line = f"{program}: {kind}{finding.host}: {fault.cause}; {fault.cure} [{fault.name}]"
        print(line, file=out, flush=True)
    return bool(refusing)
