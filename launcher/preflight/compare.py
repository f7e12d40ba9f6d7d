"""Combine the nodes' preflights: all faults in one list, and the differences between nodes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from distributed.environment import printable
from launcher.preflight.checks import CHECKS
from launcher.preflight.must_match import mismatches
from launcher.text import MANY, count, fold_names
from launcher.wire.messages import Fault, Report

MOST_SHOWN = 200  # findings
LONGEST = 1000  # characters of a finding
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


def combine(
    reports: Sequence[Report], silent: Sequence[Finding] = (), seconds: float | None = None
) -> Preflight:
    """Return the result for all nodes: the silent ones' faults come first, differences last.

    `reports` are by node rank; `silent` has the faults of the nodes that sent none. `seconds` is
    how long the preflight took; without it, the time of the slowest node counts.
    """
    findings = [*silent]
    findings += [Finding(report.host, fault) for report in reports for fault in report.faults]
    num_checks = sum(CHECKS.values())
    if len(reports) > 1:
        findings += find_differences(reports)
        done_by_each = [{*report.done} for report in reports[1:]]
        num_checks += COMPARED + len(set.intersection(*done_by_each))  # made by all of them
    took_s = max(report.seconds for report in reports) if seconds is None else seconds
    return Preflight(num_checks, findings, len(reports), took_s)


def find_differences(reports: Sequence[Report]) -> Iterator[Finding]:
    """Yield how nodes differ from the first report's, and the faults found at the master's port.

    Without node rank 0's report, or if it could not open the port, no node could reach that port:
    then the faults found there are omitted.
    """
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
    """Print one line for each finding, or one for all nodes if many have the same fault.

    Faults come before warnings. Returns whether any of them prevents the start; with `is_strict`,
    warnings do too, and are printed as faults.
    """
    by_weight = sorted(preflight.findings, key=lambda finding: finding.fault.warns)
    hosts = dict[Fault, dict[str, None]]()  # each host once, in their order
    for finding in by_weight:
        hosts.setdefault(finding.fault, {})[finding.host] = None

    lines = []
    for finding in by_weight:
        fault = finding.fault
        having_it = [*hosts[fault]]
        is_common = len(having_it) > MANY
        if is_common and finding.host != having_it[0]:
            continue  # the line of the first host names all
        kind = "warning: " if fault.warns and not is_strict else ""
        who = ", ".join(fold_names(having_it)) if is_common else finding.host
        lines.append(f"{kind}{who}: {fault.cause}; {fault.cure} [{fault.name}]")

    for line in lines[:MOST_SHOWN]:
        print(f"{program}: {printable(line, LONGEST)}", file=out, flush=True)
    if more := lines[MOST_SHOWN:]:
        print(f"{program}: {count(len(more), 'more finding')}", file=out, flush=True)
    return any(is_strict or not fault.warns for fault in hosts)
