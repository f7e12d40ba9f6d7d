"""A notice (SIGUSR1 or SIGUSR2): which ranks get it, and the warning if none of them handles it."""

import math
import signal
from dataclasses import dataclass, field

from launcher import own_time, processes
from launcher.agent.facts import Facts
from launcher.agent.node_ranks import NodeRanks
from launcher.own_time import Deadline
from launcher.text import Say
from launcher.wire import limits

UNHANDLED = (
    "warning: the script does not handle {}, which announces the time limit; "
    "it continues without saving until the job ends at the limit [time-limit]"
)


@dataclass
class Notice:
    """A notice that arrives as a signal during an attempt.

    It is sent only to ranks that handle it, because it would kill the others. Ranks that are
    still starting get it as soon as they handle it.
    """

    ranks: NodeRanks
    facts: Facts
    show: Say
    _warning: Deadline = field(default_factory=Deadline)
    _came: dict[int, float] = field(default_factory=dict)  # when each notice came last

    def accept(self, signum: int) -> bool:
        """Record a notice for deliver(), which warns NOTICE_WARN_S later if no rank handles it.

        Returns False, and records nothing, if the same one came less than NOTICE_SAME_S ago.
        """
        now = own_time.now()
        if now - self._came.get(signum, -math.inf) < limits.NOTICE_SAME_S:
            return False
        self._came[signum] = now
        self._warning.set_within(limits.NOTICE_WARN_S)
        return True

    def deliver(self) -> None:
        """Send each notice, once, to the ranks that handle it by now.

        On node rank 0, warn once NOTICE_WARN_S have passed if none could be sent to a rank here.
        """
        for signum, came in list(self._came.items()):  # a signal handler may add one
            for each in self.ranks.living():
                # A newly forked rank still has the agent's handlers and session.
                is_ready = processes.handles(each.pid, signum)
                if is_ready and (each.rank, came) not in self.facts.noticed:
                    processes.send([each.pid], signum)
                    self.facts.noticed.add((each.rank, came))

        if self._warning.expire() and not self.facts.noticed and self.ranks.node_rank == 0:
            self.show(UNHANDLED.format(signal.Signals(min(self._came)).name))
