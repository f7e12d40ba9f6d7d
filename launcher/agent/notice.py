"""A notice (SIGUSR1 or SIGUSR2): which ranks get it, and the warning if none of them handles it."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable

from launcher import own_time, processes
from launcher.agent.facts import Facts
from launcher.agent.node_ranks import NodeRanks
from launcher.own_time import Deadline
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
        self._warning = Deadline()
        self._came: dict[int, float] = {}  # when each notice came last

    def take(self, signum: int) -> bool:
        """Note a notice. Returns False if it came a moment ago, too, by another route."""
        now = own_time.now()
        if now - self._came.get(signum, -math.inf) < limits.NOTICE_SAME_S:
            return False
        self._came[signum] = now
        self._warning.set_within(limits.NOTICE_WARN_S)
        return True

    def deliver(self) -> None:
        """Send each notice to ranks that handle it by now; warn if none does in NOTICE_WARN_S."""
        for signum, came in list(self._came.items()):  # a signal handler may add one
            for each in self._ranks.living():
                # A newly forked rank still has the agent's handlers and session.
                is_ready = os.getpgid(each.pid) == each.pid and processes.handles(each.pid, signum)
                if is_ready and (each.rank, came) not in self._facts.noticed:
                    processes.send([each.pid], signum)
                    self._facts.noticed.add((each.rank, came))

        if self._warning.expire() and not self._facts.noticed and self._ranks.node_rank == 0:
            self._show(UNHANDLED.format(signal.Signals(min(self._came)).name))
