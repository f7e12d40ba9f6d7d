"""The nodes of a run: which take part, which are silent, and what is left on lost ones.

The launcher may have caused a silence itself, if it was stopped or its machine was asleep.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Container, Iterator, Sequence

from launcher.fanout.connection import Connection
from launcher.fanout.launch_end import NodePart
from launcher.fanout.loop import Loop, Show
from launcher.outcome import Outcome
from launcher.wire import limits
from launcher.wire.messages import Exit, Hello, Membership, Report, Sweep

Connect = Callable[[str, str, Show], Connection]


class Nodes:
    """Which nodes take part. If the run can continue without a node, the agents report changes.

    Connects again to lost nodes, to end the processes that are left there.
    """

    def __init__(
        self, connections: Sequence[Connection], connect: Connect, *, can_change: bool
    ) -> None:
        self.connections = connections  # by the node rank that each node started with
        self.can_change = can_change
        self._connect = connect
        self._membership: Membership | None = None  # the newest
        self._until = math.inf
        self._looks: dict[Connection, Connection] = {}  # the newest second connection to each

    def leave_behind(self) -> list[Connection]:
        """Leave the nodes that the run has begun to continue without. Returns them."""
        known = filter(None, (node.answer(Membership) for node in self.connections))
        newest = max(known, key=lambda membership: membership.attempt, default=None)
        if newest is None or newest == self._membership:
            return []
        self._membership = newest
        there = enumerate(self.connections)
        left = [node for place, node in there if place not in newest.nodes and not node.is_left]
        for node in left:
            node.leave_behind()
        return left

    @property
    def current(self) -> list[Connection]:
        """The nodes that take part, by node rank, followed by the spares."""
        if self._membership is None:
            return list(self.connections)
        places = self._membership.nodes
        return [self.connections[place] for place in places if 0 <= place < len(self.connections)]

    @property
    def others_s(self) -> float:
        """The limit for the other nodes' parts to end after one has."""
        return limits.for_nodes(limits.OTHERS_S, len(self.connections))

    def is_overdue(self, rest_s: float) -> bool:
        """Whether a node has ended, and the run has neither ended nor continued in time."""
        ended = any(node.lost or node.answer(Exit) is not None for node in self.current)
        until = time.monotonic() + limits.DECIDE_S + rest_s
        self._until = min(self._until, until) if ended else math.inf
        return self.can_change and time.monotonic() > self._until

    def sweep(self, node: Connection) -> None:
        """Connect again to a lost node, to end the processes that are left there."""
        look = self._connect(node.name, f"{os.urandom(16).hex()}.0", lambda line, is_error: None)
        look.ask(Sweep(node.token))
        self._looks[node] = look

    def find_unreachable(self, loop: Loop, within_s: float) -> dict[Connection, str]:
        """Check that nothing is left on lost nodes. Returns the unreachable ones, and why."""
        for node in self.connections:
            look = self._looks.get(node)
            has_failed = look is not None and look.code is not None and look.answer(Exit) is None
            if node.answer(Exit) is None and (look is None or (node.is_left and has_failed)):
                self.sweep(node)
        self._await_looks(loop, within_s)
        return {
            node: look.last_words for node, look in self._looks.items() if not look.answer(Exit)
        }

    def end_hung(self, loop: Loop) -> None:
        """After a refusal, end what hangs, or was stopped, on nodes that did not report."""
        for node in self.connections:
            is_there = node.code is None and node.answer(Hello) is not None
            if is_there and node.answer(Report) is None:
                self.sweep(node)
        self._await_looks(loop, limits.SSH_CONNECT_S + limits.SWEEP_S)

    def _await_looks(self, loop: Loop, within_s: float) -> None:
        until = time.monotonic() + within_s
        looks = self._looks.values()
        while any(look.code is None for look in looks) and time.monotonic() < until:
            for look in looks:
                if look.answer(Exit) is not None:
                    look.close_input()
            loop.wait(until - time.monotonic())  # from here on, signals have no effect

    def parts(self, unreachable: Container[Connection]) -> list[NodePart]:
        """Return how each node's part of the run ended, by node rank."""
        return [
            NodePart(
                host=node.name,
                code=ended.code if (ended := node.answer(Exit)) else None,
                told=node.answer(Outcome),
                lost=node.lost,
                is_reachable=node not in unreachable,
                is_silent=node.is_silent,
            )
            for node in self.current
        ]


class Silence:
    """What the launcher knows about silences, including its own."""

    def __init__(self, connections: Sequence[Connection], limit_s: float) -> None:
        self.connections = connections
        self.limit_s = limit_s
        self.still_s = 0.0  # how long this process was suspended just now
        self._turned_at = self._recall_until = 0.0  # since boot, including sleep

    @property
    def awaited(self) -> list[Connection]:
        """The nodes whose connection is open, and whose part of the run has not ended."""
        return [
            node
            for node in self.connections
            if node.code is None and not node.is_left and node.answer(Exit) is None
        ]

    def note_turn(self, *, is_ending: bool) -> None:
        """Detect that this process or the machine was suspended; that does not count as silence."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        slept_s = now - (self._turned_at or now)
        self._turned_at = now
        if slept_s > limits.GAP_S:
            self.still_s = slept_s
            self._recall_until = now + limits.RECALL_S
            for node in self.connections:
                node.forgive_silence()
        elif now > self._recall_until and not is_ending:
            self.still_s = 0.0  # the run has survived it

    def due(self) -> float:
        """Return when the first node will have been silent for too long."""
        return min((node.heard + self.limit_s for node in self.awaited), default=math.inf)

    def news(self) -> Iterator[str]:
        """Name the nodes that have become silent, and those that are heard again."""
        for node in self.awaited:
            if news := node.silence_news.describe(time.monotonic() - node.heard, self.limit_s):
                yield f"{node.name}: {news}"

    def find(self) -> list[Connection]:
        """Return the nodes to give up on: all silent ones, once one has been silent too long."""
        now = time.monotonic()
        if now < self.due():
            return []
        return [node for node in self.awaited if now - node.heard > self.limit_s / 2]

    def recall(self) -> list[Connection]:
        """When the first node ends, return recently silent ones, which may have caused the end."""
        now = time.monotonic()
        blamed = []
        for node in self.connections:
            lasts_s = now - node.heard
            ended, seconds = (now, lasts_s) if lasts_s > limits.GAP_S else node.gap
            if ended > now - limits.RECALL_S:
                node.lose(f"no heartbeat for {seconds:.0f} s (network down?)", is_silent=True)
                blamed.append(node)
        return blamed
