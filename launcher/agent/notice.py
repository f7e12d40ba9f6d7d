"""A notice (SIGUSR1): which ranks get it, and what a user is told if none of them handles it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from distributed.stop_signals import NOTICE
from launcher import own_time, processes
from launcher.agent.facts import Facts
from launcher.agent.node_ranks import NodeRanks
from launcher.wire import limits

UNHANDLED = (
    "warning: the script does not handle SIGUSR1, which announces the time limit: "
    "it continues, and the job ends at the limit with nothing saved [time-limit]"
)


class Notice:
    """A notice that comes in an attempt, by a signal or in SLURM's jobs by a file (query.py).

    Only ranks that handle it are sent it: the others would die of it. Those that are still
    starting get it as soon as they handle it.
    """

    def __init__(self, ranks: NodeRanks, facts: Facts, show: Callable[[str], None]) -> None:
        self._ranks, self._facts, self._show = ranks, facts, show
        self._warn_at = 0.0  # 0: the notice has not come

    def look(self) -> None:
        """Send it to the ranks that handle it by now; after NOTICE_WARN_S say if none do."""
        if NOTICE not in self._facts.signals:
            return
        for each in self._ranks.living():
            # A rank that was forked just now still has the agent's handlers, and its session.
            is_ready = os.getsid(each.pid) == each.pid and processes.handles(each.pid, NOTICE)
            if is_ready and each.rank not in self._facts.noticed:
                processes.send([each.pid], NOTICE)
                self._facts.noticed.add(each.rank)
        self._warn_at = self._warn_at or own_time.now() + limits.NOTICE_WARN_S
        if own_time.now() >= self._warn_at:
            self._warn_at = math.inf
            if not self._facts.noticed and self._ranks.node_rank == 0:
                self._show(UNHANDLED)
