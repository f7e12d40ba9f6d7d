"""A clock that stops while this process is stopped, so that no peer counts as late afterwards.

SIGSTOP, a suspended job or a sleeping machine stops a process, and usually also everything that it
waits for. A loop that waits for others iterates every few seconds. A longer gap between two
iterations means that the process was stopped, so silences are measured from the end of that gap.
"""

import math
import time
from collections.abc import Iterator

from launcher.wire import limits


class OwnTime:
    """A clock that one loop reads in every iteration, at least every STILL_S seconds."""

    def __init__(self) -> None:
        self._newest = time.monotonic()
        self._missed_s = 0.0
        self._resumed = -math.inf

    def now(self) -> float:
        """Return the time for deadlines. A suspension counts as STILL_S seconds at most."""
        before = self._newest
        self._newest = time.monotonic()
        if (gap := self._newest - before) > limits.STILL_S:
            self._missed_s += gap - limits.STILL_S
            self._resumed = self._newest
        return self._newest - self._missed_s

    def since(self, moment: float) -> float:
        """Return the seconds since a monotonic time, or since a later resumption."""
        self.now()
        return self._newest - max(moment, self._resumed)


_OWN = OwnTime()  # of the main thread
now = _OWN.now
since = _OWN.since


def turns(limit_s: float, pause_s: float = limits.POLL_S) -> Iterator[None]:
    """Yield at once and after each pause, until the limit: to check for what sends no event."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        yield
        time.sleep(pause_s)


class SilenceNews:
    """Chooses the lines about one peer's silences: a warning, and a line when it is heard again."""

    def __init__(self) -> None:
        self._before_s = 0.0

    def note_silence(self, silence_s: float, limit_s: float) -> str:
        """Note how long the peer has been silent. Returns the line that is due; empty if none is.

        The peer is lost after `limit_s` seconds.
        """
        before_s = self._before_s
        self._before_s = silence_s
        quiet_s = min(limits.QUIET_S, limit_s / 2)
        if before_s <= quiet_s < silence_s:
            return (
                f"warning: no heartbeat for {silence_s:.0f} s; "
                f"after {limit_s:g} s, this node is lost (SILENCE_SECONDS)"
            )
        if silence_s <= quiet_s < before_s:
            return f"heartbeats again, after {before_s:.0f} s without any"
        return ""


class Deadline:
    """The time at which an event loop must act. It starts unset; once set, it only moves closer."""

    def __init__(self) -> None:
        self.at = math.inf

    def set_within(self, seconds: float) -> None:
        """Set it to this many seconds from now, unless it is already earlier."""
        self.at = min(self.at, now() + seconds)

    def expire(self) -> bool:
        """Return whether it has passed; if so, unset it."""
        has_passed = now() >= self.at
        if has_passed:
            self.at = math.inf
        return has_passed
