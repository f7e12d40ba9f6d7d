"""What an event costs one process, for bench/scale.py."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BEATS_S = 10.0
REPEATS = 3  # of an event; one run can cost twice as much as the next
USUAL_LIMIT = ["prlimit", "--nofile=1024:"]  # the soft limit of open files that most systems set


@dataclass(frozen=True)
class Cost:
    """What one event cost a program."""

    cpu_s: float
    messages: int = 0  # sent to the other nodes


@dataclass
class Meter:
    """Reads the processor time of one process, without that of its children."""

    pid: int
    _cpu_s: float = field(default=0.0, init=False)

    @property
    def cpu_s(self) -> float:
        """Its processor time so far, or what it last was if the process has ended."""
        clock = ~self.pid << 3 | 2  # clock_getcpuclockid(3): to the nanosecond, /proc only to 10 ms
        with contextlib.suppress(OSError):
            self._cpu_s = time.clock_gettime(clock)
        return self._cpu_s

    def measure(self, act: Callable[[], object], count: Callable[[], int]) -> Cost:
        """Return what the process spends until `act` returns; `count` counts its messages."""
        sent, before = count(), self.cpu_s
        over = threading.Event()
        reader = threading.Thread(target=self._read_until, args=(over,))
        reader.start()
        try:
            act()
        finally:
            over.set()
            reader.join()
        return Cost(self.cpu_s - before, count() - sent)

    def _read_until(self, over: threading.Event) -> None:
        """Read the processor time again and again: the process may end at any moment."""
        while not over.wait(0.01):
            _ = self.cpu_s


def median(costs: Sequence[Cost]) -> Cost:
    """Return the middle one of the costs of an event in several runs."""
    return sorted(costs, key=lambda cost: cost.cpu_s)[len(costs) // 2]


def beat(_started: object) -> None:
    """Let a run continue for a while, in which nothing happens."""
    time.sleep(BEATS_S)


def wait_until(is_so: Callable[[], object], limit_s: float = 500.0) -> None:
    """Wait until something is so. Raises TimeoutError."""
    end = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


def exponent(points: Sequence[tuple[int, float]]) -> str:
    """Return e, if the cost grows with the number of nodes to the power of e, in two points."""
    if len(points) < 2:
        return "-"
    (nodes, small), (more_nodes, large) = points
    ratio = max(large, 0.01) / max(small, 0.01)  # the tables show no less
    power = math.log(ratio) / math.log(more_nodes / nodes)
    return f"{round(power, 1) + 0.0:.1f}"  # never -0.0
