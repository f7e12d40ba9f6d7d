"""The nodes of a run: which take part, which are silent, and what is left on lost ones.

The launcher may have caused a silence itself, if it was stopped or its machine was asleep.
"""

import math
import os
import time
from collections.abc import Callable, Container, Iterator, Sequence

from launcher.fanout.connection import Connection, Gap, Turn, wait_for
from launcher.fanout.launch_end import NodePart
from launcher.fanout.loop import Loop, Show
from launcher.outcome import Outcome
from launcher.wire import limits
from launcher.wire.messages import Exit, Hello, Membership, Report, Sweep

AT_ONCE = 8  # new connections: sshd drops some once 10 are waiting to log in
TRIES = 4


class Nodes:
    """Which nodes take part. If the run can continue without a node, the agents report changes.

    Connects again to lost nodes, to end the processes that are left there.
    """

    def __init__(
        self,
        connections: list[Connection],  # by the node rank that each node started with
        connect: Callable[[str, str, Show], Connection],  # by name for ssh, token and screen
        *,
        can_change: bool,
    ) -> None:
        self.connections = connections
        self.can_change = can_change
        self._connect = connect
        self._membership: Membership | None = None  # the newest
        self._decide_by = math.inf  # when the run must have ended or continued
        self._sweeps = dict[Connection, Connection]()  # the newest second connection to each

    def connect_all(
        self, connect: Callable[[int], Connection], num_nodes: int, turn: Turn, until: float
    ) -> None:
        """Connect to all nodes. Wait until each has said hello or has failed, or until this time.

        If many connections arrive at once, an sshd, especially a bastion's, drops some
        (MaxStartups). If others succeed, the dropped ones are tried again, TRIES times in all,
        after longer pauses. `connect` connects to the node with an index. `until` is monotonic
        time. Replaces a dropped connection in `connections`.
        """
        connections = self.connections
        for place in range(num_nodes):
            connections.append(connect(place))
            if place % AT_ONCE == AT_ONCE - 1:
                wait_for(Hello, connections, turn, time.monotonic() + limits.CONNECT_PACE_S)

        tries = [1] * num_nodes
        while (now := time.monotonic()) < until:
            has_way = any(connection.answer(Hello) for connection in connections)
            dropped = [
                place
                for place, connection in enumerate(connections)
                if has_way and connection.is_dropped and tries[place] < TRIES
            ]
            if not dropped and not any(connection.may_come for connection in connections):
                return

            for number, place in enumerate(dropped):  # not all at once, or sshd drops some again
                pause_s = (
                    limits.CONNECT_AGAIN_S * 2 ** tries[place] + limits.CONNECT_PACE_S * number
                )
                if now > connections[place].heard + pause_s:
                    tries[place] += 1
                    connections[place] = connect(place)
            turn(min(until, now + limits.CONNECT_AGAIN_S))

    def disconnect_all(self) -> None:
        """End all connections at once, before connect_all() makes new ones."""
        for connection in self.connections:
            connection.disconnect()
        self.connections.clear()

    def leave_behind(self) -> list[Connection]:
        """Leave the nodes that the run has begun to continue without. Returns them, each once."""
        known = [found for node in self.connections if (found := node.answer(Membership))]
        if not known:
            return []
        newest = max(known, key=lambda membership: membership.attempt)
        if newest == self._membership:
            return []

        self._membership = newest
        left = []
        for place, node in enumerate(self.connections):
            if place not in newest.nodes and not node.is_left:
                node.leave_behind()
                left.append(node)
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
        """The limit, in seconds, for the other nodes' parts of the run to end after the first."""
        return limits.for_nodes(limits.OTHERS_S, len(self.connections))

    def check_deadline(self, rest_s: float) -> bool:
        """Return whether the run has neither ended nor continued in time after a node's end.

        Keeps the deadline for that: a call after the first end sets it to DECIDE_S and `rest_s`
        from then, and a call while all current nodes are running clears it. False if the run cannot
        continue without a node.
        """
        has_end = any(node.lost or node.answer(Exit) for node in self.current)
        decide_by = time.monotonic() + limits.DECIDE_S + rest_s
        self._decide_by = min(self._decide_by, decide_by) if has_end else math.inf
        return self.can_change and time.monotonic() > self._decide_by

    def sweep(self, node: Connection) -> None:
        """Connect again to a lost node, to end the processes that are left there."""
        token = f"{os.urandom(16).hex()}.0"
        sweep = self._connect(node.name, token, lambda line, is_error: None)
        sweep.ask(Sweep(node.token))
        self._sweeps[node] = sweep

    def sweep_unreported(self, loop: Loop, within_s: float) -> dict[Connection, str]:
        """Sweep the nodes that have not reported their end. Returns the unreachable ones, and why.

        Waits up to `within_s` for their answers. A node that was left behind is swept again if that
        has failed: it may be reachable by now.
        """
        for node in self.connections:
            if node.answer(Exit):
                continue
            sweep = self._sweeps.get(node)
            has_failed = sweep and sweep.code is not None and not sweep.answer(Exit)
            if not sweep or (node.is_left and has_failed):
                self.sweep(node)

        self._await_sweeps(loop, within_s)
        return {
            node: sweep.last_words for node, sweep in self._sweeps.items() if not sweep.answer(Exit)
        }

    def end_hung(self, loop: Loop) -> None:
        """After a refusal, end what hangs, or was stopped, on nodes that did not report. Waits."""
        for node in self.connections:
            is_there = node.answer(Hello) and node.code is None
            if is_there and not node.answer(Report):
                self.sweep(node)
        self._await_sweeps(loop, limits.SSH_CONNECT_S + limits.SWEEP_S)

    def _await_sweeps(self, loop: Loop, within_s: float) -> None:
        """Wait until all second connections have ended, for up to `within_s`.

        Closes those that have reported. From here on, signals have no effect.
        """
        until = time.monotonic() + within_s
        sweeps = self._sweeps.values()
        while any(sweep.code is None for sweep in sweeps) and time.monotonic() < until:
            for sweep in sweeps:
                if sweep.answer(Exit):
                    sweep.close_input()  # which ends the far side, and with it ssh
            loop.wait(until - time.monotonic())

    @property
    def num_killed(self) -> int:
        """How many processes were left when their node's part of the run ended."""
        return sum(end.left for node in self.connections if (end := node.answer(Exit)))

    def parts(self, unreachable: Container[Connection]) -> list[NodePart]:
        """Return how each node's part of the run ended, by node rank, then of the spares."""
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
            if node.code is None and not node.is_left and not node.answer(Exit)
        ]

    def detect_suspension(self, *, is_ending: bool) -> None:
        """Detect that this process or the machine was suspended; that does not count as silence.

        To be called after each wait. Sets `still_s` to the seconds of a suspension, until the run
        has survived it by RECALL_S, or for good if the run is ending.
        """
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        slept_s = now - (self._turned_at or now)
        self._turned_at = now
        if slept_s > limits.GAP_S:
            self.still_s = slept_s
            self._recall_until = now + limits.RECALL_S
            for node in self.connections:
                node.forgive_silence()
        elif now > self._recall_until and not is_ending:
            self.still_s = 0.0

    def due(self) -> float:
        """Return when the next node will have been silent for too long (monotonic time)."""
        return min((node.heard + self.limit_s for node in self.awaited), default=math.inf)

    def describe(self) -> Iterator[str]:
        """Yield a line for each node that has become silent, or is heard again, since last time.

        Each node's `silence_news` remembers what was reported last.
        """
        for node in self.awaited:
            if news := node.silence_news.note_silence(time.monotonic() - node.heard, self.limit_s):
                yield f"{node.name}: {news}"

    def find_lost(self) -> list[Connection]:
        """Return the nodes to give up on: all silent ones, once one has been silent too long."""
        now = time.monotonic()
        if now < self.due():
            return []
        return [node for node in self.awaited if now - node.heard > self.limit_s / 2]

    def blame_recent(self) -> list[Connection]:
        """Record as lost the nodes that were silent just before another one's end. Returns them.

        Their silence may have caused that end.
        """
        now = time.monotonic()
        blamed = []
        for node in self.connections:
            silent_s = now - node.heard
            last = Gap(now, silent_s) if silent_s > limits.GAP_S else node.gap
            if last.ended > now - limits.RECALL_S:
                node.lose(f"no heartbeat for {last.seconds:.0f} s (network down?)", is_silent=True)
                blamed.append(node)
        return blamed
