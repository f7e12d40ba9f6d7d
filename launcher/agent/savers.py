"""Which ranks may save for GRACE seconds after another rank has failed (no torch).

A rank whose script handles SIGTERM itself may be writing an emergency checkpoint. Ranks that only
wait for the failed one must end at once, however. The agent tells them apart as follows:

1. A rank that does not handle SIGTERM ends by it.
2. A rank that handles all stop signals uses the helper's Stop, or handles them alike: it would stop
   at a step on which all ranks agree, which cannot happen any more.
3. Python handles a signal only between two lines of the main thread. If the thread is still where
   it was before the signal, such as in a collective, its handler does not run.

Every other rank that handles SIGTERM gets GRACE.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from distributed.heartbeat import STACK_SIGNAL
from distributed.stop_signals import handled_signals
from launcher import processes
from launcher.agent.diagnosis import stuck
from launcher.agent.node_ranks import NodeRanks, Rank, ask_for_stacks
from launcher.text import Say, name_ranks
from launcher.wire import limits


@dataclass
class Savers:
    """The ranks of this node that handled SIGTERM themselves when it was sent."""

    ranks: NodeRanks
    grace_s: float
    show: Say
    others_s: float = 0.0  # for ranks of other nodes to save
    _all: Sequence[Rank] = ()
    _before: dict[int, str] = field(default_factory=dict)  # by rank: its stack before SIGTERM
    _is_judged: bool = False  # grant_grace() was called, or no rank may save

    def record_handlers(self) -> bool:
        """Record which ranks handle SIGTERM, just before it is sent. Returns whether any does.

        Blocks until they have written their stacks, for up to SAVERS_LOOK_S. If GRACE is no longer
        than RANK_TERM_S, which every rank gets, it records none.
        """
        if self.grace_s > limits.RANK_TERM_S:
            self._all = [each for each in self.ranks.living() if _may_save(each.pid)]
            self._before = self._collect_stacks()
        return bool(self._all)

    def grant_grace(self) -> list[Rank]:
        """Grant GRACE to the ranks whose SIGTERM handlers are running, and report that to the user.

        Returns these ranks; none in a second call, or after refuse_all(). Blocks until the ranks
        have written their stacks, for up to SAVERS_LOOK_S.
        """
        was_judged = self._is_judged
        self._is_judged = True
        if was_judged:
            return []

        after = self._collect_stacks()
        # Where a rank has not moved since before SIGTERM, its handler does not run.
        same = [rank for rank, stack in after.items() if stack and stack == self._before.get(rank)]
        working = [each for each in self._all if each.code is None and each.rank not in same]

        if working:
            names = name_ranks([each.rank for each in working])
            handle = "handles" if len(working) == 1 else "handle"
            self.show(f"{names} {handle} SIGTERM, and may save for {self.grace_s:g} s (GRACE)")
        return working

    def refuse_all(self) -> None:
        """Let no rank save: the run is stuck, or a second Ctrl-C has come."""
        self._is_judged = True

    def _collect_stacks(self) -> dict[int, str]:
        """Have the ranks that can write their stacks do so. Returns the main threads', by rank.

        A rank that has not written within SAVERS_LOOK_S, on a busy machine, is left out.
        """
        asked = [each for each in self._all if each.code is None and _writes_stacks(each.pid)]
        sizes = ask_for_stacks(asked)
        stuck.wait_for_stacks(sizes, limits.SAVERS_LOOK_S)

        stacks = {}
        for each in asked:
            if stuck.size_of(each.stack_file) > sizes[each.stack_file]:
                main_thread = stuck.read_threads(each.stack_file)[-1]
                stacks[each.rank] = main_thread.partition("\n")[2]  # without its first line
        return stacks


def _may_save(pid: int) -> bool:
    """Whether a rank handles SIGTERM, but not all stop signals: see rule 2."""
    handles_all = all(processes.has_signal(pid, "SigCgt", signum) for signum in handled_signals())
    return processes.handles(pid, signal.SIGTERM) and not handles_all


def _writes_stacks(pid: int) -> bool:
    return processes.has_signal(pid, "SigCgt", STACK_SIGNAL) and not processes.is_stopped(pid)
