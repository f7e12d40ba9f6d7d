"""Which rank failed first, how a run ended and its exit code: functions of recorded facts.

The attempt (attempt.py) records the facts and acts; nothing here reads a clock, a file or a
process.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distributed.errors import STOPPED
from distributed.stop_signals import NOTICE, stop_signals
from launcher import failure
from launcher.failure import Failure, RaisedError
from launcher.failure_block import Outcome
from launcher.text import name_ranks
from launcher.wire.messages import Assignment


@dataclass(frozen=True)
class Parts:
    """A snapshot whose parts are on several nodes, which put them together to save it."""

    step: int
    folder: str  # below that of the run's checkpoints; what a killed save leaves has such a name
    lost: Sequence[int] = ()  # ranks whose own parts are lost: another node has copies

    def __post_init__(self) -> None:
        if not re.fullmatch(r"step-\d+\.tmp-[0-9a-f]+", self.folder):
            raise ValueError(f"{self.folder} is no folder for parts")


@dataclass(frozen=True)
class Verdict:
    """What node rank 0 tells all nodes when an attempt has ended."""

    outcome: Outcome  # without what each agent adds itself: its start, the run id, the command
    next: Assignment | None = None  # the agent's part in the attempt that follows
    parts: Parts | None = None  # of the newest snapshot, if it is on several nodes


@dataclass(frozen=True)
class NodeEnd:
    """What a node's agent knows when all its ranks have ended; it is sent to node rank 0."""

    stopped: Sequence[int] = ()  # ranks that the agent had to stop
    first_rank: int = 0
    codes: Sequence[int] = ()  # the exit codes of all its ranks, from the first on
    saved_step: int = -1  # of the newest checkpoint that a rank of it has told; -1: none
    parts: Mapping[str, Sequence[int]] = field(default_factory=dict)  # of snapshots: ranks, by step
    copies: Mapping[str, Sequence[int]] = field(default_factory=dict)  # the same of another node's

    def __post_init__(self) -> None:
        if not all(0 <= code <= 255 for code in self.codes):
            raise ValueError(f"{self.codes}: no exit codes")

    @property
    def left(self) -> dict[int, int]:
        """The exit codes of the ranks that ended by themselves, by rank."""
        codes = dict(enumerate(self.codes, self.first_rank))
        return {rank: code for rank, code in codes.items() if rank not in self.stopped}


@dataclass
class Facts:
    """What one agent has seen of an attempt, in the order in which it saw it."""

    signals: list[int] = field(default_factory=list)  # stop signals from outside
    noticed: set[int] = field(default_factory=set)  # ranks here that a notice was sent to
    codes: dict[int, int] = field(default_factory=dict)  # by rank of this node, once it has ended
    stopped: set[int] = field(default_factory=set)  # ranks here that the agent had to stop
    failures: list[Failure] = field(default_factory=list)  # here, and those that other nodes told
    nodes: dict[int, NodeEnd] = field(default_factory=dict)  # other nodes' ends, on node rank 0
    verdict: Verdict | None = None  # node rank 0's, on the other nodes

    @property
    def asked(self) -> list[int]:
        """The stop signals that ranks here were sent, by this agent or by SLURM itself."""
        is_known = self.noticed or 128 + NOTICE in self.codes.values()
        return [signum for signum in self.signals if signum != NOTICE or is_known]

    @property
    def is_ending(self) -> bool:
        """True once this agent has reason to end the attempt."""
        return bool(self.failures or self.stopped)


def is_asked(end: Failure, signals: Sequence[int], *, has_saved: bool) -> bool:
    """Whether a rank that ended, not with code 0, stopped on request.

    After a stop signal, every end counts except an error of the script itself. Without one, only
    code 75 counts, if a rank of the node has reported a save.
    """
    if not signals:
        return end.code == STOPPED and has_saved
    return end.has_left or end.is_consequence or end.code - 128 in stop_signals()


def describe_end(
    unknown: Failure,  # as far as it is known of any rank; its time is the end's
    raised: RaisedError | None,  # the error file's content; None if the rank left none
    *,
    code: int | None,  # the exit code; None of a rank that has not left yet
    is_out_of_memory: bool,  # the kernel has killed for lack of memory during the attempt
    last_text: str,  # the last line that the rank wrote to stderr
) -> Failure:
    """Return the failure of a rank that ended, or is about to, by an error."""
    if raised is None:
        code = code or 1
        fault, cause = failure.explain(code, out_of_memory=is_out_of_memory)
        has_left = not failure.signal_name(code)
        return replace(unknown, fault=fault, cause=cause, code=code, has_left=has_left)
    fault = raised.fault or failure.fault_of(raised.message)
    cause = raised.message.removesuffix(f" [{fault}]")
    if raised.has_left and last_text not in cause:
        cause += f", after: {last_text}"
    cause = failure.one_line(cause) + failure.install_cure(cause)
    return replace(
        unknown,
        fault=fault,
        cause=f"{cause} ({failure.one_line(raised.notes)})" if raised.notes else cause,
        code=code if code and code < 128 else raised.code,  # its excepthook may choose another
        time=raised.time,
        frames=failure.user_frames(raised.stack),
        is_consequence=failure.is_peer_lost(cause),
        has_left=raised.has_left,
    )


def read_traceback(last_line: str, time: float) -> RaisedError:
    """Return what a rank's last line shows if there is no error file: the disk may be full."""
    has_left = last_line.startswith("KeyboardInterrupt")  # as Python prints it
    return RaisedError(last_line, "", 1, time, has_left=has_left)


def is_consequence(facts: Facts, first: Failure | None, rank: int) -> bool:
    """Whether a rank of this node ended only because of the first failure, another's."""
    if first is None or rank == first.rank or facts.codes.get(rank) == 0:
        return False
    return all(each.is_consequence for each in facts.failures if each.rank == rank)


def end_of_node(facts: Facts, saved_step: int, *snapshots: Mapping[str, Sequence[int]]) -> NodeEnd:
    """Return what this node reports to node rank 0 when all its ranks have ended.

    `snapshots` are NodeEnd.parts and NodeEnd.copies.
    """
    codes = [code for _, code in sorted(facts.codes.items())]
    first_rank = min(facts.codes, default=0)
    return NodeEnd(sorted(facts.stopped), first_rank, codes, saved_step, *snapshots)


def reach_verdict(facts: Facts, *, saved_step: int, left: int) -> Verdict:
    """Return how the attempt ended: as node rank 0 reported it, otherwise from what is known here.

    `saved_step` is that of the newest checkpoint reported by a rank here, or -1; `left` are the
    processes here that could not be ended.
    """
    if facts.verdict is not None:
        return replace(facts.verdict, outcome=replace(facts.verdict.outcome, left=left))
    nodes = [end_of_node(facts, saved_step), *facts.nodes.values()]
    has_saved = any(node.saved_step >= 0 for node in nodes)
    # The failure that began it: causes before consequences, then by time.
    first = min(facts.failures, key=lambda each: (each.is_consequence, each.time), default=None)
    if first is None:
        asked = facts.asked
        code = stop_code(nodes, asked)
        ends = describe_ends(nodes, asked, has_saved=has_saved) if code else ""
        if code and asked:
            ends = f"by {signal.Signals(asked[0]).name}: {ends}"
        signum = next(iter(asked), 0)
        outcome = Outcome(code, left=left, ends=ends, signum=signum, has_saved=has_saved)
        return Verdict(outcome)
    lost = {each.rank for each in facts.failures if each.is_consequence} - {first.rank}
    stopped = {rank for node in nodes for rank in node.stopped} - lost - {first.rank}
    finished = [rank for node in nodes for rank, code in node.left.items() if code == 0]
    if first.is_consequence and finished:  # nobody has failed: one has left too early
        before = f"before it rank {min(finished)} exited with code 0"
        first = replace(first, cause=f"{first.cause} ({before})")
    stacks = [line for each in facts.failures for line in each.stacks]
    first = replace(first, stacks=stacks, saved_step=max(saved_step, first.saved_step))
    outcome = Outcome(first.code, first, len(lost), len(stopped), left, has_saved=has_saved)
    return Verdict(outcome)


def stop_code(nodes: Sequence[NodeEnd], signals: Sequence[int]) -> int:
    """Return the exit code of a run that did not fail.

    0 when it was done. When it was stopped: 75 if ranks saved, another code with which one left, or
    that of the signal. A rank that has reported a save exits with 0 only when done.
    """
    codes = [code for node in nodes for code in node.left.values() if code != 0]
    has_saved = any(node.saved_step >= 0 for node in nodes)
    if other := next((code for code in codes if code != STOPPED), 0):
        return other
    if codes and has_saved:
        return STOPPED
    if codes or any(node.stopped for node in nodes):
        return 128 + (signals[0] if signals else signal.SIGKILL)
    wanted = [] if has_saved else [signum for signum in signals if signum != NOTICE]
    return 128 + wanted[0] if wanted else 0


def describe_ends(nodes: Sequence[NodeEnd], signals: Sequence[int], *, has_saved: bool) -> str:
    """Return how the ranks of a stopped run ended, alike ones together: "ranks 0-2 saved, ..."."""
    why = "by a second Ctrl-C" if signals.count(signal.SIGINT) > 1 else "after GRACE"
    ends = {rank: f"killed {why}" for node in nodes for rank in node.stopped}
    for node in nodes:
        for rank, code in node.left.items():
            if code == STOPPED and has_saved:
                ends[rank] = "saved"
            elif code - 128 in stop_signals():
                ends[rank] = f"ended by {signal.Signals(code - 128).name}"
            else:
                ends[rank] = f"exited with code {code}"
    groups: dict[str, list[int]] = {}
    for rank, end in sorted(ends.items()):
        groups.setdefault(end, []).append(rank)
    return ", ".join(f"{name_ranks(ranks)} {end}" for end, ranks in groups.items())
