"""Decides which ranks, nodes and links are slow, by comparing each with the median.

What seems slow is measured again by itself, until nothing does, at most REPEATS times. The best
measurement counts: other programs can make a measurement slower, never faster.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

SLOW_RANK = 1.2  # times slower than usual for its kind of device
SUSPECT = 1.1  # if a rank is so many times slower, all ranks are measured again
SLOW_LINK = 2.0  # times slower than usual
REPEATS = 12  # others may interfere for seconds
MOST_LINKS = 8  # that can be named besides slow nodes: more would take long to measure again
Pair = tuple[int, int]  # two nodes, each by the rank that measures its links
Rounds = Sequence[Sequence[Pair]]  # of disjoint pairs
Links = Mapping[Pair, float]  # bytes/s from the first to the second


@dataclass(frozen=True)
class SlowLink:
    """A link that is slow; or a node, if all its links are."""

    pair: Pair  # the best link, if it is a node
    usual: float  # bytes/s
    node: int | None = None  # by its rank, as in a pair


def usual_speed(speeds: Iterable[float]) -> float:
    """Return the median: of an even number the higher one, so that half of them can be slow."""
    return statistics.median_high(speeds)


def find_slow_ranks(
    compute: Callable[[], list[float]], kinds: Sequence[str]
) -> tuple[list[float], dict[int, float]]:
    """Return each rank's speed, and how many times slower than usual each slow rank is.

    `compute` measures the speeds of all ranks; `kinds` has the models of their devices.
    """
    best = compute()
    for _ in range(REPEATS):
        if not slow_ranks(best, kinds, SUSPECT):
            break
        best = [*map(max, best, compute())]
    return best, slow_ranks(best, kinds)


def slow_ranks(
    speeds: Sequence[float], kinds: Sequence[str], least: float = SLOW_RANK
) -> dict[int, float]:
    """Return the slow ranks, and how many times slower than usual for its kind each of them is."""
    ranks = [*zip(speeds, kinds, strict=True)]
    usual = {
        kind: usual_speed(speed for speed, other in ranks if other == kind) for kind in {*kinds}
    }
    times = [usual[kind] / speed for speed, kind in ranks]
    return {rank: slower for rank, slower in enumerate(times) if slower >= least}


def find_slow_links(
    measure: Callable[[Rounds], Links], rounds: Rounds
) -> tuple[Links, list[SlowLink]]:
    """Return the bandwidths of all links, and what is slow.

    `measure` measures all pairs of `rounds`, those of one round at the same time.
    """
    best = dict(measure(rounds))
    slow = slow_links(best)
    for _ in range(REPEATS):
        if not slow:
            break
        latest = measure([[link.pair] for link in slow])
        best |= {pair: max(speed, best[pair]) for pair, speed in latest.items()}
        slow = still_slow(slow, best)
    return best, slow


def slow_links(links: Links) -> list[SlowLink]:
    """Return the slow nodes, and then the slowest of the slow links between other nodes.

    A node is as fast as its best link, and a link as fast as the slower of its two directions. Two
    nodes are equally fast, but one direction between them can be slow.
    """
    slowest_first = sorted(links, key=links.__getitem__)
    ways = [pair for pair in slowest_first if pair == slower_way(pair, links)]
    best = {node: pair for pair in ways for node in pair}  # the last one counts
    usual = usual_speed(links[pair] for pair in best.values())
    nodes = still_slow([SlowLink(best[node], usual, node) for node in sorted(best)], links)

    slow = {link.node for link in nodes}
    others = {pair: speed for pair, speed in links.items() if not slow & {*pair}}
    usual = usual_speed(others.values())
    between = still_slow([SlowLink(pair, usual) for pair in ways if pair in others], links)
    return [*nodes, *between[:MOST_LINKS]]


def still_slow(suspects: Iterable[SlowLink], links: Links) -> list[SlowLink]:
    """Return those that are slow according to these measurements."""
    return [
        link for link in suspects if link.usual >= SLOW_LINK * links[slower_way(link.pair, links)]
    ]


def slower_way(pair: Pair, links: Links) -> Pair:
    """Return the slower direction of a link, from the first to the second."""
    return min(pair, pair[::-1], key=links.__getitem__)
