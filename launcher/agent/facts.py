"""What the agent of a node has seen of an attempt, and what follows from it (no torch).

The attempt (attempt.py) records the facts and acts on them; nothing here reads a clock, a file or
the state of a process.
"""

from dataclasses import dataclass, field, replace

from distributed.errors import STOPPED
from distributed.stop_signals import notices, stop_signals
from launcher.failure import Failure
from launcher.outcome import NodeEnd, end_attempt
from launcher.wire.messages import NodeBeat, Verdict
from launcher.wire.states import RankState


@dataclass
class Facts:
    """What one agent has seen of an attempt; lists are in the order of events."""

    signals: list[int] = field(default_factory=list)  # stop signals from outside
    host: str = ""
    node_rank: int = 0
    # The ranks here that were sent a notice, each with the time at which the notice came.
    noticed: set[tuple[int, float]] = field(default_factory=set)
    codes: dict[int, int] = field(default_factory=dict)  # exit codes here, by rank
    stopped: set[int] = field(default_factory=set)  # ranks here that the agent had to stop
    failures: list[Failure] = field(default_factory=list)  # here, or reported by other nodes
    stragglers: dict[int, RankState] = field(default_factory=dict)  # of other nodes
    nodes: dict[int, NodeEnd] = field(default_factory=dict)  # how other nodes ended
    verdict: Verdict | None = None  # from node rank 0, on the other nodes

    @property
    def signals_sent(self) -> list[int]:
        """The stop signals sent to ranks here, by this agent or by SLURM itself.

        Notices count only if a rank here was sent one, or was killed by one.
        """
        is_known = self.noticed or any(128 + one in self.codes.values() for one in notices())
        return self.signals if is_known else self.stops

    @property
    def stops(self) -> list[int]:
        """The signals from outside that ask for a stop: after a notice alone, the run may go on."""
        return [signum for signum in self.signals if signum not in notices()]

    @property
    def is_ending(self) -> bool:
        """True once this agent has reason to end the attempt."""
        return bool(self.failures or self.stopped)

    def record_report(self, node: int, message: object) -> None:
        """Record what another node's agent reports: a heartbeat, its end, or the verdict."""
        match message:
            case NodeBeat() if message.straggler:
                self.stragglers[node] = message.straggler
            case NodeEnd():
                self.nodes[node] = message
            case Verdict():
                self.verdict = message

    def is_requested_stop(self, end: Failure, *, has_saved: bool) -> bool:
        """Whether a rank that exited with a code other than 0 stopped on request.

        After a stop signal, every exit counts except the script's own errors. After a notice, code
        75 and the notice's own signal do, and what follows from code 75 of a rank here. Without
        either, code 75 does if a rank of this node has reported a checkpoint.
        """
        if self.stops:
            return end.has_left or end.is_consequence or end.code - 128 in stop_signals()
        if not self.signals_sent:
            return end.code == STOPPED and has_saved
        has_followed = end.is_consequence and STOPPED in self.codes.values()
        return has_followed or end.code == STOPPED or end.code - 128 in self.signals

    def is_consequence(self, first: Failure | None, rank: int) -> bool:
        """Whether a rank of this node exited only because another rank failed first."""
        if first is None or rank == first.rank or self.codes.get(rank) == 0:
            return False
        return all(each.is_consequence for each in self.failures if each.rank == rank)

    def describe_end(self, saved_step: int) -> NodeEnd:
        """Return what this node reports to node rank 0 when all its ranks have exited.

        `saved_step` is the step of the newest checkpoint that a rank here has reported, or -1. The
        caller adds the snapshots.
        """
        codes = [code for _, code in sorted(self.codes.items())]
        first_rank = min(self.codes, default=0)
        return NodeEnd(
            sorted(self.stopped),
            first_rank,
            codes,
            saved_step,
            host=self.host,
            node_rank=self.node_rank,
        )

    def reach_verdict(self, saved_step: int, left: int) -> Verdict:
        """Return how the attempt ended: node rank 0's verdict, or one based on what is known here.

        `saved_step` is as for describe_end(); `left` is the number of processes here that could not
        be ended.
        """
        verdict = self.verdict
        if verdict is None:
            nodes = [self.describe_end(saved_step), *self.nodes.values()]
            verdict = Verdict(end_attempt(self.failures, nodes, self.signals_sent))
        return replace(verdict, outcome=replace(verdict.outcome, left=left))
