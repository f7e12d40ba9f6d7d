"""How a run over several nodes ended, from what each of them reported: the code, and the block."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from signal import Signals

from distributed.errors import BAD_INPUT, CANNOT_START, REFUSED, STOPPED
from launcher.agent.control import Done
from launcher.failure import Failure, signal_name
from launcher.failure_block import Outcome
from launcher.fanout.protocol import Exit
from launcher.plan.plan import Plan
from launcher.text import short_host_name
from launcher.wire import limits
from launcher.wire.messages import KILLED


@dataclass(frozen=True)
class NodeResult:
    """How one node's part of the run ended."""

    host: str
    exit: Exit | None  # None: it was lost
    report: Outcome | Done | None  # what its agent told last, if it did
    lost: str = ""  # why the launcher gave it up
    is_reachable: bool = True  # when the launcher looked again
    is_silent: bool = False  # when the launcher gave it up


def conclude(
    nodes: Sequence[NodeResult],
    plan: Plan,
    *,
    started: float,
    stopped_by: Signals | None,
    still_s: float = 0.0,  # for so long the launcher stood still, just before the end
) -> Outcome:
    """Return the outcome of the run, from that of each node by node rank."""
    can_resume = plan.checkpoint_dir is not None  # train.py can; of other programs nobody knows
    command = plan.run_variables().get("LAUNCH_COMMAND", "") if can_resume else ""
    unknown = Outcome(0, started=started, run_id=plan.run_id, command=command)

    def blame(rank: int, fault: str, cause: str, code: int = KILLED) -> Outcome:
        log = "" if plan.engine or rank < 0 else f"{plan.log_dir}/{plan.run_id}/node_{rank}.log"
        host = nodes[rank].host if rank >= 0 else short_host_name()
        failure = Failure(fault, cause, code, host, rank, time.time(), log=log)
        return replace(unknown, code=code, failure=failure)

    codes = [node.exit.code for node in nodes if node.exit]
    outcomes = [
        node.report for node in nodes if isinstance(node.report, Outcome) and node.report.code
    ]
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    has_failed = any(failure.rank >= 0 and not failure.is_consequence for failure in failures)
    is_well = len(codes) == len(nodes) and {*codes} <= {0, STOPPED}
    outlived = has_failed or is_well  # a silence
    if still_s and not (stopped_by or outlived):
        cause = f"the launcher was suspended for {still_s:.0f} s (SIGSTOP, Ctrl-Z, sleep)"
        cause += f"; nodes end a run after {limits.SILENCE_S:g} s without a heartbeat"
        return blame(-1, "launcher-killed", cause)
    if lost := find_lost(nodes, outlived=outlived):
        return blame(*lost)
    silent = [0 if node.report else code for node, code in zip(nodes, codes, strict=True)]
    if CANNOT_START in silent:
        cause = "the node agent was not started; the lines above say why"
        return blame(silent.index(CANNOT_START), "env-missing", cause, CANNOT_START)
    agents = () if plan.engine else (BAD_INPUT, REFUSED)  # whose causes an agent reports itself
    refused = [code for code in silent if code in agents]
    code = next(filter(None, refused + codes), 0)
    if code == 0 or refused:
        return replace(unknown, code=code)
    if any(silent) and not (failures or stopped_by or plan.engine):  # the others were only stopped
        return blame(*find_unreported(silent))
    if outcomes:  # where one has failed, the others were only stopped
        failed = next((outcome for outcome in outcomes if outcome.failure), None)
        return replace(outcomes[0], code=code) if outcomes[0].failure or failed is None else failed
    if stopped_by:
        return replace(unknown, code=128 + stopped_by)
    cause = f"a rank failed; the report of {plan.engine} is above"
    return blame(codes.index(code), "rank-error", cause, code)


def find_lost(nodes: Sequence[NodeResult], *, outlived: bool) -> tuple[int, str, str] | None:
    """Return node rank (-1: the launcher's machine), fault and cause of a node that was lost.

    With `outlived`, the run has ended for another reason than a silence.
    """
    lost = [
        rank
        for rank, node in enumerate(nodes)
        if node.exit is None or (node.lost and not (node.is_silent and outlived))
    ]
    if not lost:
        return None
    silent = [rank for rank in lost if nodes[rank].is_silent]
    if len(nodes) > 1 and len(silent) == len(nodes):
        cause = f"no heartbeat from any node for {limits.SILENCE_S:g} s (network down?)"
        return -1, "link-lost", cause
    is_link = silent or not all(node.is_reachable for node in nodes)
    first = (silent or lost)[0]
    cause = nodes[first].lost or "this node has not ended its part in time"
    return first, "link-lost" if is_link else "launcher-killed", cause


def find_unreported(codes: Sequence[int]) -> tuple[int, str, str, int]:
    """Return node rank, fault, cause and code of the first agent that reported nothing.

    They are known by their exit codes.
    """
    rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
    cause = "the node agent ended without a report"
    if name := signal_name(code):
        cause = f"{name} to the node agent, from outside this run"
    return rank, "agent-killed", cause, code
