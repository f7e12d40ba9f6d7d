"""Combine the nodes' preflights: all faults in one list, and the differences between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from distributed.environment import printable
from launcher.preflight.checks import CHECKS
from launcher.preflight.must_match import mismatches
from launcher.text import MANY, count, fold_names
from launcher.wire.messages import Fault, Report

MOST_SHOWN, LONGEST = 200, 1000  # findings, and characters of each
COMPARED = 2  # versions and files; the rest is compared at the master's port


@dataclass(frozen=True)
class Finding:
    """A fault, and the host that has it."""

    host: str
    fault: Fault


@dataclass(frozen=True)
class Preflight:
    """The result of the preflight of all nodes."""

    num_checks: int
    findings: Sequence[Finding]
    num_nodes: int
    seconds: float


def judge(reports: Sequence[Report], seconds: float | None = None) -> Preflight:
    """Return all faults, followed by the differences between nodes; `reports` are by node rank."""
    findings = [Finding(report.host, fault) for report in reports for fault in report.faults]
    num_checks = sum(CHECKS.values())
    if len(reports) > 1:
        findings += differences(reports)
        num_checks += COMPARED + len(set.intersection(*({*report.done} for report in reports[1:])))
    took = max(report.seconds for report in reports) if seconds is None else seconds
    return Preflight(num_checks, findings, len(reports), took)


def differences(reports: Sequence[Report]) -> Iterator[Finding]:
    """Yield how nodes differ from the first one, and the faults found at the master's port."""
    first, *others = reports
    names = {fault.name for fault in first.faults}
    is_master_there = first.node_rank == 0 and not names & {"port-in-use", "run-is-live"}
    if is_master_there:
        yield from (Finding(first.host, fault) for fault in first.met)

    for report in others:
        for name, cause in mismatches(first, report):
            yield Finding(report.host, Fault(name, cause, "make them the same"))
        # If the master's name resolves to that node itself, the node has tested its own ports.
        is_own = any(
            fault.name == "loopback-address" and not fault.warns for fault in report.faults
        )
        if is_master_there and not is_own:
            yield from (Finding(report.host, fault) for fault in report.met)


def print_findings(preflight: Preflight, program: str, *, is_strict: bool, out: TextIO) -> bool:
    """Print one line for each fault, or for one that many nodes have.

    Returns whether any fault prevents the start. With `is_strict`, every warning does.
    """
    by_weight = sorted(preflight.findings, key=lambda finding: finding.fault.warns)
    hosts: dict[Fault, dict[str, None]] = {}  # each host once, in their order
    for finding in by_weight:
        hosts.setdefault(finding.fault, {})[finding.host] = None

    lines = []
    for finding in by_weight:
        fault = finding.fault
        names = [*hosts[fault]]
        if len(names) <= MANY:
            names = [finding.host]
        elif finding.host != names[0]:
            continue
        kind = "warning: " if fault.warns and not is_strict else ""
        who = ", ".join(fold_names(names))
        lines.append(f"{kind}{who}: {fault.cause}; {fault.cure} [{fault.name}]")

    for line in lines[:MOST_SHOWN]:
        print(f"{program}: {printable(line, LONGEST)}", file=out, flush=True)
    if more := lines[MOST_SHOWN:]:
        print(f"{program}: {count(len(more), 'more finding')}", file=out, flush=True)
    return any(is_strict or not fault.warns for fault in hosts)
