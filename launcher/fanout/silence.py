"""Who was silent for too long: a node, or the launcher itself, which was stopped or asleep."""

from __future__ import annotations

import time
from collections.abc import Sequence

from launcher.agent.control import SILENCE_S
from launcher.fanout.connection import Connection
from launcher.fanout.protocol import Exit

RECALL_S = 5.0  # after a silence, for an end that it explains


class Silence:
    """What the launcher knows of silences, its own among them."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.connections = connections
        self.still_s = 0.0  # for so long this process has just stood still
        self._turned_at = self._recall_until = 0.0  # since the machine's start, its sleep included

    @property
    def awaited(self) -> list[Connection]:
        """The nodes whose part of the run has not ended."""
        there = [one for one in self.connections if not (one.lost or one.is_left)]
        return [one for one in there if one.answer(Exit) is None]

    def note_turn(self, *, is_ending: bool) -> None:
        """Notice that this process was stopped, or the machine asleep: no node was silent then."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        slept_s, self._turned_at = now - (self._turned_at or now), now
        if slept_s > SILENCE_S / 2:
            self.still_s, self._recall_until = slept_s, now + RECALL_S
            for one in self.connections:
                one.heard, one.blip = time.monotonic(), (0.0, 0.0)
        elif now > self._recall_until and not is_ending:
            self.still_s = 0.0  # the run has outlived it

    def find(self) -> list[Connection]:
        """Return the nodes to give up: where one was silent for too long, all that are silent."""
        now, awaited = time.monotonic(), self.awaited
        if all(now - one.heard < SILENCE_S for one in awaited):
            return []
        return [one for one in awaited if now - one.heard > SILENCE_S / 2]

    def recall(self) -> list[Connection]:
        """At the first end, return the nodes that are silent, or were: they may have left us."""
        now, found = time.monotonic(), []
        for one in self.connections:
            lasts_s = now - one.heard
            ended, seconds = (now, lasts_s) if lasts_s > SILENCE_S / 2 else one.blip
            if ended > now - RECALL_S:
                one.lost, one.is_silent = f"no sign of life for {seconds:.0f} s: network cut?", True
                found.append(one)
        return found
