"""A time by which an event loop does something."""

from __future__ import annotations

import math

from launcher import own_time


class Deadline:
    """A time of this process (own_time) that can only move closer; not set at first."""

    def __init__(self) -> None:
        self.at = math.inf

    def set_within(self, seconds: float) -> None:
        """Set it to this many seconds from now, unless it is earlier."""
        self.at = min(self.at, own_time.now() + seconds)

    def take(self) -> bool:
        """Whether it has passed; if so it is not set any more."""
        has_passed = own_time.now() >= self.at
        if has_passed:
            self.at = math.inf
        return has_passed
