"""How a run ended: which of its failures is shown, and the exit code.

Node rank 0's agent ends an attempt with the first failure of the ranks of all nodes. The launcher
of a run on several nodes accounts for each node's part: what its agent reported, or that it
reported nothing; choose() returns the account that counts. A run on one machine, or on nodes that
were started by hand, has only agents.

Nothing here reads a clock, a file or a process.
"""

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from operator import itemgetter

from distributed.errors import BAD_INPUT, REFUSED, STOPPED
from distributed.stop_signals import notices, stop_signals
from launcher.failure import Failure
from launcher.text import group_ranks, name_ranks


@dataclass(frozen=True)
class Outcome:
    """How a run ended: everything that is reported to the user."""

    code: int  # exit code
    failure: Failure | None = None  # the first one
    lost_peer: int = 0  # ranks that ended as a consequence
    stopped: int = 0  # ranks that their agent had to stop
    left: int = 0  # processes that could not be ended
    ends: str = ""  # if the run was stopped: by what, and how its ranks ended
    signum: int = 0  # if the run was stopped: the first signal
    has_saved: bool = False  # a rank has reported a save
    started: float = 0.0  # seconds since the epoch
    run_id: str = ""
    command: str = ""  # resumes the run: as typed, quoted for a shell; empty if none does

    def __post_init__(self) -> None:
        if not 0 <= self.code <= 255:
            raise ValueError(f"{self.code} is not an exit code")

    @property
    def has_text(self) -> bool:
        """Whether there is something to print: an agent that starts nothing prints why itself."""
        is_silent = self.code in (0, BAD_INPUT, REFUSED) and not self.ends
        return self.failure is not None or not is_silent

    def with_saved(self, step: int) -> "Outcome":
        """Return the outcome with a checkpoint that was saved afterwards."""
        first = self.failure and replace(self.failure, saved_step=step)
        return replace(self, failure=first, has_saved=True)


class Basis(IntEnum):
    """What an account is based on. The first in this order counts: it may have caused the rest."""

    LOST_NODE = 1  # the launcher's connection to a node ended, or the node did not end its part
    CAUSE = 2  # an error in a rank, or what the agents saw happen first
    SILENCE = 3  # the launcher and a node lost contact, and the node ended its part
    NOT_STARTED = 4  # a node's agent could not be started
    REFUSAL = 5  # an agent refused to start, and has said why
    LOST_AGENT = 6  # an agent was killed, failed, or cannot be reached by the others
    CONSEQUENCE = 7  # a rank lost its peer, for an unknown reason
    NO_REPORT = 8  # an agent ended without a report
    STOP = 9  # somebody asked the run to stop
    DONE = 10


Account = tuple[Basis, Outcome]


def choose(accounts: Iterable[Account]) -> Outcome:
    """Return the outcome of the account that counts: among those with the same basis, the first."""
    _, outcome = min(accounts, key=itemgetter(0))
    return outcome


# --- an attempt, as node rank 0's agent sees it -------------------------------------------------


@dataclass(frozen=True)
class NodeEnd:
    """What a node's agent knows when all its ranks have ended; it is sent to node rank 0."""

    stopped: Sequence[int] = ()  # ranks that the agent had to stop
    first_rank: int = 0
    codes: Sequence[int] = ()  # the exit codes of all its ranks, from first_rank on
    saved_step: int = -1  # of the newest checkpoint that one of its ranks reported; -1: none
    parts: Mapping[str, Sequence[int]] = field(default_factory=dict)  # of snapshots: ranks by step
    copies: Mapping[str, Sequence[int]] = field(default_factory=dict)  # the same, from another node
    host: str = ""
    node_rank: int = 0

    def __post_init__(self) -> None:
        if not all(0 <= code <= 255 for code in self.codes):
            raise ValueError(f"{self.codes}: not exit codes")

    @property
    def own_exits(self) -> dict[int, int]:
        """The exit codes of the ranks that ended by themselves, by rank."""
        codes = dict(enumerate(self.codes, self.first_rank))
        return {rank: code for rank, code in codes.items() if rank not in self.stopped}


def end_attempt(
    failures: Sequence[Failure],  # of all nodes, in the order of their arrival
    nodes: Sequence[NodeEnd],  # node rank 0 first
    signals: Sequence[int],  # the stop signals that were sent to ranks
) -> Outcome:
    """Return how an attempt ended: with its first failure, or because it was stopped or is done.

    A consequence counts only if every failure is one.
    """
    first = min(failures, key=lambda failure: (failure.is_consequence, failure.time), default=None)
    if not first:
        return _end_without_failure(nodes, signals)
    if first.is_consequence:
        first = _exit_before(first, nodes) or first

    lost = {each.rank for each in failures if each.is_consequence} - {first.rank}
    stopped = {rank for node in nodes for rank in node.stopped} - lost - {first.rank}

    stacks = dict[str, list[int]]()
    for each in failures:
        for text, ranks in each.stacks.items():
            stacks.setdefault(text, []).extend(ranks)
    for on_all_nodes in stacks.values():
        on_all_nodes.sort()

    first = replace(first, stacks=stacks, saved_step=max(nodes[0].saved_step, first.saved_step))
    return Outcome(
        first.code, first, lost_peer=len(lost), stopped=len(stopped), has_saved=has_saved(nodes)
    )


def _end_without_failure(nodes: Sequence[NodeEnd], signals: Sequence[int]) -> Outcome:
    """Return how an attempt ended if no rank has failed: it was stopped, or it is done."""
    # Notices last (False sorts before True): a notice ends nothing by itself.
    stops = sorted(signals, key=notices().__contains__)
    code = stop_code(nodes, stops)
    ends = describe_ends(nodes, stops) if code else ""
    if code and stops:
        ends = f"by {signal.Signals(stops[0]).name}: {ends}"
    return Outcome(code, ends=ends, signum=next(iter(signals), 0), has_saved=has_saved(nodes))


def _exit_before(victim: Failure, nodes: Iterable[NodeEnd]) -> Failure | None:
    """Return the failure of the rank that exited with code 0 too early, so that `victim` failed.

    Of several, it is that of the lowest rank. None if no rank exited with 0.
    """
    finished = [
        (rank, node) for node in nodes for rank, code in node.own_exits.items() if code == 0
    ]
    if not finished:
        return None

    rank, node = min(finished, key=itemgetter(0))
    return replace(
        victim,
        cause=f"exited with code 0 before rank {victim.rank}, which then failed: {victim.cause}",
        rank=rank,
        local_rank=rank - node.first_rank,
        host=node.host,
        node_rank=node.node_rank,
        frames=(),
        is_consequence=False,
    )


def has_saved(nodes: Iterable[NodeEnd]) -> bool:
    """Whether a rank has reported a save."""
    return any(node.saved_step >= 0 for node in nodes)


def stop_code(nodes: Sequence[NodeEnd], signals: Sequence[int]) -> int:
    """Return the exit code of a run that did not fail.

    It is 0 if the run completed. If the run was stopped, it is the first of these that applies: a
    rank's own exit code, 75 if ranks saved, the signal's code. A rank that has reported a save
    exits with 0 only on completion. In `signals`, notices come last; if it is empty, although ranks
    were stopped, the agent has killed them.
    """
    codes = [code for node in nodes for code in node.own_exits.values() if code != 0]
    others = [code for code in codes if code != STOPPED]
    if others:
        return others[0]
    if codes and has_saved(nodes):
        return STOPPED
    if codes or any(node.stopped for node in nodes):
        return 128 + (signals[0] if signals else signal.SIGKILL)

    if has_saved(nodes):
        return 0
    stops = [signum for signum in signals if signum not in notices()]
    return 128 + stops[0] if stops else 0


def describe_ends(nodes: Sequence[NodeEnd], signals: Sequence[int]) -> str:
    """Return how the ranks of a stopped run ended, in groups: "ranks 0-2 saved, ..."

    The group of the lowest rank comes first.
    """
    why = "by a second Ctrl-C" if signals.count(signal.SIGINT) > 1 else "after GRACE"
    ends = {rank: f"killed {why}" for node in nodes for rank in node.stopped}
    for node in nodes:
        for rank, code in node.own_exits.items():
            if code == STOPPED and has_saved(nodes):
                ends[rank] = "saved"
            elif code - 128 in stop_signals():
                ends[rank] = f"ended by {signal.Signals(code - 128).name}"
            else:
                ends[rank] = f"exited with code {code}"

    groups = group_ranks(ends)
    return ", ".join(f"{name_ranks(ranks)} {end}" for end, ranks in groups.items())
