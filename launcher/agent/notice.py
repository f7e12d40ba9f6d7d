"""A notice (SIGUSR1 or SIGUSR2): which ranks get it, and the warning if none of them handles it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from distributed.stop_signals import notices
from launcher import own_time, processes
from launcher.agent.facts import Facts
from launcher.agent.node_ranks import NodeRanks
from launcher.wire import limits

UNHANDLED = (
    "warning: the script does not handle {}, which announces the time limit; "
    "it continues without saving until the job ends at the limit [time-limit]"
)


class Notice:
    """A notice that arrives during an attempt, as a signal or, under SLURM, as a file (query.py).

    It is sent only to ranks that handle it, because it would kill the others. Ranks that are
    still starting get it as soon as they handle it.
    """

    def __init__(self, ranks: NodeRanks, facts: Facts, show: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._facts = facts
        self._show = show
        self._warn_at = 0.0  # 0 until the notice arrives

    def deliver(self) -> None:
        """Send the notice to ranks that handle it by now; warn after NOTICE_WARN_S if none does."""
        came = next((one for one in notices() if one in self._facts.signals), None)
        if came is None:
            return

        for each in self._ranks.living():
            # A newly forked rank still has the agent's handlers and session.
            is_ready = os.getpgid(each.pid) == each.pid and processes.handles(each.pid, came)
            if is_ready and each.rank not in self._facts.noticed:
                processes.send([each.pid], came)
                self._facts.noticed.add(each.rank)

        self._warn_at = self._warn_at or own_time.now() + limits.NOTICE_WARN_S
        if own_time.now() >= self._warn_at:
            self._warn_at = math.inf
            if not self._facts.noticed and self._ranks.node_rank == 0:
                self._show(UNHANDLED.format(came.name))
