"""Second connections to nodes that were lost, to end what is left there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from launcher.fanout import protocol
from launcher.fanout.connection import Connection
from launcher.fanout.loop import Loop
from launcher.fanout.protocol import Exit, Sweep

Connect = Callable[[str, str, Callable[[bytes, bool], None]], Connection]


class Again:
    """The newest second connection to each node that has one."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._looks: dict[Connection, Connection] = {}

    def look(self, one: Connection) -> None:
        """Connect to a node that was lost, to end what is left there."""
        token = os.urandom(16).hex()
        look = self._connect(one.node, token, lambda line, is_error: None)
        look.send_line(protocol.write_request(Sweep(one.token)))
        self._looks[one] = look

    def find_unreachable(
        self, connections: Sequence[Connection], loop: Loop, within_s: float
    ) -> dict[Connection, str]:
        """See that nothing is left on nodes that were lost; returns those out of reach, and why."""
        for one in connections:
            look = self._looks.get(one)
            has_failed = look is not None and look.code is not None and look.answer(Exit) is None
            if one.answer(Exit) is None and (look is None or (one.is_left and has_failed)):
                self.look(one)
        until = time.monotonic() + within_s
        looks = self._looks.values()
        while any(look.code is None for look in looks) and time.monotonic() < until:
            for look in looks:
                if look.answer(Exit) is not None:
                    look.close_input()
            loop.wait(until - time.monotonic())  # signals change nothing any more
        there = self._looks.items()
        return {one: look.last_words for one, look in there if look.answer(Exit) is None}
