"""How a run over several nodes ended, from what each of them has told: the code, and the block."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from signal import SIGKILL, Signals

from distributed.errors import BAD_INPUT, CANNOT_START, REFUSED
from launcher.failure import Failure
from launcher.failure_block import End, RunSummary
from launcher.fanout.protocol import Exit
from launcher.plan.plan import Plan


@dataclass(frozen=True)
class NodeResult:
    """How one node's part of the run ended."""

    host: str
    exit: Exit | None  # None: it was lost
    end: End | None  # what its agent told, if it did
    lost: str = ""  # why the launcher gave it up
    is_reachable: bool = True  # when the launcher looked again


def conclude(
    nodes: Sequence[NodeResult], plan: Plan, *, started: float, stopped_by: Signals | None
) -> End:
    """Return the end of the run, from that of each node by node rank.

    Where somebody has told it already it `is_told`.
    """

    def blame(rank: int, code: int, fault: str, cause: str) -> End:
        log = "" if plan.engine else f"{plan.log_dir}/{plan.run_id}/node_{rank}.log"
        failure = Failure(fault, cause, code, nodes[rank].host, rank, time.time(), log=log)
        return End(code, failure, summary, is_told=False)

    can_resume = plan.checkpoint_dir is not None  # train.py can; of other programs nobody knows
    command = plan.run_variables().get("LAUNCH_COMMAND", "") if can_resume else ""
    summary = RunSummary(started, 0, 0, 0, plan.run_id, command)
    lost = [rank for rank, node in enumerate(nodes) if node.lost or node.exit is None]
    if lost:
        fault = "launcher-killed" if all(node.is_reachable for node in nodes) else "link-lost"
        cause = nodes[lost[0]].lost or "this node has not ended its part in time"
        return blame(lost[0], 128 + SIGKILL, fault, cause)
    codes = [node.exit.code for node in nodes if node.exit]
    silent = [0 if node.end else code for node, code in zip(nodes, codes, strict=True)]
    if CANNOT_START in silent:
        cause = "the node agent was not started; what stands above says why"
        return blame(silent.index(CANNOT_START), CANNOT_START, "env-missing", cause)
    agents = () if plan.engine else (BAD_INPUT, REFUSED)  # whose causes an agent tells itself
    refused = [code for code in silent if code in agents]
    code = next(filter(None, refused + codes), 0)
    if code == 0 or refused:
        return End(code, None, summary, is_told=True)
    told = [node.end for node in nodes if node.end and node.end.code]
    if told:
        end = next((end for end in told if not end.is_told), told[0])
        return replace(end, code=code, is_told=False)
    if plan.engine and stopped_by:
        return End(128 + stopped_by, None, summary, is_told=False)
    if plan.engine:
        cause = f"a rank failed; the report of {plan.engine} stands above"
        return blame(codes.index(code), code, "rank-error", cause)
    return blame(codes.index(code), code, "agent-killed", "the node agent ended without a report")
