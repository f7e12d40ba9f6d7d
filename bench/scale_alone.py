"""What programs compute for many nodes before or after they exchange anything with them."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from scale_cost import Cost
from scale_ssh import launch_command

from launcher import typed_json
from launcher.selftest import judge, links
from launcher.selftest.judge import Pair
from launcher.selftest.links import Link

USUAL, SLOW = 1e9, 1e8  # bytes/s


def dry_run(number: int) -> Cost:
    """Return what it costs to print the plan for this many nodes, with bash's part."""
    before = _spent_by_children()
    with tempfile.TemporaryDirectory() as folder:
        command = ["env", f"PYTHON={sys.executable}", *launch_command(number, "--dry-run")]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return Cost(_spent_by_children() - before)


def _spent_by_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_selftest(number: int) -> Iterator[tuple[str, Cost]]:
    """Yield what each rank computes in a self-test, in which one node's links are slow."""
    nodes = range(number)
    rounds = links.rounds(nodes)
    yield "pairs in rounds", _timed(lambda: links.rounds(nodes))

    pairs = [pair for one in rounds for pair in one]
    told = {frozenset(pair): [*map(typed_json.encode, _both_links(pair))] for pair in pairs}

    def measure(now: Sequence[Sequence[Pair]]) -> dict[Pair, float]:
        """Read what the nodes have measured, as launcher/selftest/main.py does."""
        texts = (text for one in now for pair in one for text in told[frozenset(pair)])
        read = [typed_json.parse(Link, text) for text in texts]
        return {link.pair: link.bandwidth for link in read}

    yield "read all links, find slow ones", _timed(lambda: judge.find_slow_links(measure, rounds))


def _both_links(pair: Pair) -> Iterator[Link]:
    for way in (pair, pair[::-1]):
        yield Link(way, SLOW if 1 in pair else USUAL, 1e-5)


def _timed(act: Callable[[], object]) -> Cost:
    """Return the median CPU time of three calls."""
    took = []
    for _ in range(3):
        start = time.process_time()
        act()
        took.append(time.process_time() - start)
    return Cost(statistics.median(took))
