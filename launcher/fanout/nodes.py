"""The nodes of a run as its launcher knows them, and the programs that reach them.

Over ssh, each node has a program of its own (connection.py). In a SLURM job, one srun step reaches
all nodes (srun.py). The launcher may have caused a silence itself, if it was stopped or its machine
was asleep.
"""

import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from launcher.fanout.launch_end import NodePart
from launcher.fanout.loop import Child, Loop, Show
from launcher.outcome import Outcome
from launcher.own_time import SilenceNews
from launcher.plan.plan import Plan
from launcher.wire import limits, messages
from launcher.wire.launcher_link import Answers
from launcher.wire.messages import Exit, Membership, Request, Start, StopRequest, Sweep

FAR_SIDE = "launcher.fanout.far_side"
T = TypeVar("T")
N = TypeVar("N", bound="Node")
Turn = Callable[[float], None]  # handles events until this time, or for a shorter one


def far_side_command(plan: Plan, *options: str) -> list[str]:
    """Return the command that starts the far side on a node. ps shows the run and its script."""
    script = [word for word in plan.words if word[:1] != "-"][:1]
    shown = ["--rdzv-id", plan.run_id, *script]
    return plan.inside([*plan.module_command(FAR_SIDE), *options, *shown])


class Gap(NamedTuple):
    """A silence of a node."""

    ended: float = 0.0  # monotonic time
    seconds: float = 0.0


class Node:
    """What a node has sent, when it was last heard, and how its part of the run ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.code: int | None = None  # once it cannot be reached any more: an exit code
        self.is_started = False
        self.lost = ""  # why the node's part of the run ended early
        self.is_silent = False  # at the time it was lost
        self.is_left = False  # the run continues without it
        self.heard = time.monotonic()  # of the last sign of life
        self.gap = Gap()  # the last silence that could have ended the run
        self.silence_news = SilenceNews()
        self._answers = dict[type, Any]()

    def answer(self, kind: type[T]) -> T | None:
        """Return the node's message of this kind; None if it has sent none."""
        return self._answers.get(kind)

    def take(self, message: object) -> None:
        """Keep a message: the newest Membership, the first of other kinds; None: it is alive."""
        if isinstance(message, Membership):
            self._answers[Membership] = message
        self._answers.setdefault(type(message), message)
        self.note_sign_of_life()

    def note_sign_of_life(self) -> None:
        """Set `heard` to now, and `gap` if the silence before was long."""
        now = time.monotonic()
        if self.is_started and now - self.heard > limits.GAP_S:
            self.gap = Gap(now, now - self.heard)
        self.heard = now

    def forgive_silence(self) -> None:
        """Measure the silence from now on: until now, the launcher itself was suspended."""
        self.heard = time.monotonic()
        self.gap = Gap()

    def note_start(self) -> None:
        """Note that the node's agent starts now."""
        self.is_started = True
        self.heard = time.monotonic()

    def lose(self, why: str, *, is_silent: bool) -> None:
        """Record that the node's part of the run has ended early."""
        self.lost = why
        self.is_silent = is_silent

    def cut_off(self) -> None:
        """Wait for the node no longer."""
        self.code = -1

    def describe_loss(self) -> str:
        """Return the line for the terminal, with the fault's name if the node was silent."""
        return f"{self.name}: {self.lost}{' [link-lost]' if self.is_silent else ''}"

    def leave_behind(self) -> None:
        """Note that the run continues without this node."""
        self.is_left = True


class Way(Child, ABC):
    """A program that reaches one node or several. What is sent goes to all of them."""

    def __init__(
        self,
        loop: Loop,
        command: Sequence[str],
        token: str,  # begins each message
        show: Show,  # gets all other output
        *,
        last_signal: int = signal.SIGKILL,
    ) -> None:
        """Start the program. It gets `last_signal` when this process ends. Raises OSError."""
        self._show = show
        self._messages = Answers(token)
        super().__init__(loop, command, self.read_output, last_signal=last_signal)

    @abstractmethod
    def node_of(self, number: int) -> Node | None:
        """Return the node whose messages begin with this number; None if there is none."""

    def send_line(self, line: str) -> None:
        self.send(os.fsencode(f"{line}\n"))

    def beat(self) -> None:
        """Keep the program running, even if someone has stopped it."""
        self.wake()

    def ask(self, request: Request | Start | StopRequest | Sweep) -> None:
        self.send_line(messages.write(request))

    def read_output(self, data: bytes, is_error: bool) -> None:
        """Give each message to its node, and show the rest. No data means the end."""
        output = data
        if not is_error:
            output, received = self._messages.read(data)
            for number, message in received:
                if node := self.node_of(number):
                    node.take(message)

        if output:
            self._show(output, is_error)
        if not data:
            self._show(b"", is_error)


class Nodes(Generic[N]):
    """Which nodes take part. If the run can continue without a node, the agents report changes."""

    def __init__(self, everyone: Sequence[N], *, can_change: bool) -> None:
        """`everyone` is by the node rank that each node started with; it may change."""
        self.everyone = everyone
        self.can_change = can_change
        self._membership: Membership | None = None  # the newest
        self._decide_by = math.inf  # when the run must have ended or continued

    def leave_behind(self) -> list[N]:
        """Leave the nodes that the run has begun to continue without. Returns them, each once."""
        known = [found for node in self.everyone if (found := node.answer(Membership))]
        if not known:
            return []
        newest = max(known, key=lambda membership: membership.attempt)
        if newest == self._membership:
            return []

        self._membership = newest
        left = []
        for place, node in enumerate(self.everyone):
            if place not in newest.nodes and not node.is_left:
                node.leave_behind()
                left.append(node)
        return left

    @property
    def current(self) -> list[N]:
        """The nodes that take part, by node rank, followed by the spares."""
        if self._membership is None:
            return list(self.everyone)
        places = self._membership.nodes
        return [self.everyone[place] for place in places if 0 <= place < len(self.everyone)]

    @property
    def others_s(self) -> float:
        """The limit, in seconds, for the other nodes' parts of the run to end after the first."""
        return limits.for_nodes(limits.OTHERS_S, len(self.everyone))

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

    @property
    def num_killed(self) -> int:
        """How many processes were left when their node's part of the run ended."""
        return sum(end.left for node in self.everyone if (end := node.answer(Exit)))

    def parts(
        self, unreachable: Container[N] = (), unreported: int | None = None
    ) -> list[NodePart]:
        """Return how each node's part of the run ended, by node rank, then of the spares.

        `unreported` is the code of a node that has reported none.
        """
        return [
            NodePart(
                host=node.name,
                code=ended.code if (ended := node.answer(Exit)) else unreported,
                told=node.answer(Outcome),
                lost=node.lost,
                is_reachable=node not in unreachable,
                is_silent=node.is_silent,
            )
            for node in self.current
        ]


class Silence(Generic[N]):
    """What the launcher knows about silences, including its own."""

    def __init__(self, everyone: Sequence[N], limit_s: float) -> None:
        self.everyone = everyone
        self.limit_s = limit_s
        self.still_s = 0.0  # how long this process was suspended just now
        self._turned_at = self._recall_until = 0.0  # since boot, including sleep

    @property
    def awaited(self) -> list[N]:
        """The nodes that can be reached, and whose part of the run has not ended."""
        return [
            node
            for node in self.everyone
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
            for node in self.everyone:
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

    def find_lost(self) -> list[N]:
        """Return the nodes to give up on: all silent ones, once one has been silent too long."""
        now = time.monotonic()
        if now < self.due():
            return []
        return [node for node in self.awaited if now - node.heard > self.limit_s / 2]

    def blame_recent(self) -> list[N]:
        """Record as lost the nodes that were silent just before another one's end. Returns them.

        Their silence may have caused that end.
        """
        now = time.monotonic()
        blamed = []
        for node in self.everyone:
            silent_s = now - node.heard
            last = Gap(now, silent_s) if silent_s > limits.GAP_S else node.gap
            if last.ended > now - limits.RECALL_S:
                node.lose(f"no heartbeat for {last.seconds:.0f} s (network down?)", is_silent=True)
                blamed.append(node)
        return blamed


def wait_for(kind: type, nodes: Sequence[Node], turn: Turn, until: float) -> None:
    """Wait until each node has sent an answer of this kind or cannot any more, or until `until`."""
    while time.monotonic() < until and any(
        node.code is None and not node.answer(kind) for node in nodes
    ):
        turn(until)
