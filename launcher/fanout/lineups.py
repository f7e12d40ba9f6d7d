"""Which nodes a run goes on with, where it can lose some: the agents decide, and tell it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from launcher.agent.control import SILENCE_S, Lineup
from launcher.fanout.connection import Connection
from launcher.fanout.protocol import Exit

DECIDE_S = SILENCE_S + 10.0  # after the end of a node's part, for the run to go on without it


class Lineups:
    """What the launcher knows of who takes part."""

    def __init__(self, connections: Sequence[Connection], *, can_change: bool) -> None:
        self.connections = connections  # by the node rank with which each was started
        self.can_change = can_change
        self._newest: Lineup | None = None
        self._until = math.inf

    def look(self) -> list[Connection]:
        """Return the nodes that the run has left behind since the last look."""
        told = [lineup for one in self.connections if (lineup := one.answer(Lineup))]
        newest = max(told, key=lambda lineup: lineup.attempt, default=None)
        if newest is None or newest == self._newest:
            return []
        self._newest = newest
        here = {*newest.nodes, *newest.spares}
        there = enumerate(self.connections)
        left = [one for place, one in there if place not in here and not one.is_left]
        for one in left:
            one.is_left = True
        return left

    @property
    def current(self) -> list[Connection]:
        """The nodes that take part, by node rank, and after them the spares."""
        if self._newest is None:
            return list(self.connections)
        places = [*self._newest.nodes, *self._newest.spares]
        return [self.connections[place] for place in places if 0 <= place < len(self.connections)]

    def is_overdue(self) -> bool:
        """Whether a node's part has ended, and the run neither ends nor goes on without it."""
        has_ended = any(one.lost or one.answer(Exit) is not None for one in self.current)
        self._until = min(self._until, time.monotonic() + DECIDE_S) if has_ended else math.inf
        return self.can_change and time.monotonic() > self._until
