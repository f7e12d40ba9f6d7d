"""Which node or rank is slower than the others, from what all have measured."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence

SLOW_RANK = 1.3  # times the others' time
SLOW_LINK = 2.0  # times
Links = Mapping[tuple[int, int], float]  # bytes/s from a node to another


def slow_ranks(speeds: Mapping[int, float], kinds: Sequence[str]) -> dict[int, float]:
    """Return the ranks that compute slower than others on the same kind of device: how many times.

    `speeds` has the ranks that were measured, `kinds` the devices of all.
    """
    found = {}
    for rank, speed in speeds.items():
        others = [
            one for other, one in speeds.items() if other != rank and kinds[other] == kinds[rank]
        ]
        if others and statistics.median(others) >= SLOW_RANK * speed:
            found[rank] = statistics.median(others) / speed
    return found


def ranks_to_compare(
    speeds: Mapping[int, float], kinds: Sequence[str], slow: Collection[int]
) -> set[int]:
    """Return the ranks that seem slow, with a few of each of their kinds that do not."""
    chosen = {*slow}
    for kind in {kinds[rank] for rank in slow}:
        others = [rank for rank in speeds if rank not in slow and kinds[rank] == kind]
        others.sort(key=lambda rank: speeds[rank])
        middle = max(0, len(others) // 2 - 1)
        chosen |= {*others[middle : middle + 3]}
    return chosen


def best_of(node: int, links: Links) -> float:
    """Return the bandwidth of a node's best link: of each, the slower direction."""
    return max(_both_ways(pair, links) for pair in links if node in pair)


def slow_nodes(links: Links) -> dict[int, float]:
    """Return the nodes whose best link is slow beside the others' best, and that median.

    Two nodes share their one link: neither can be told from the other.
    """
    nodes = sorted({node for pair in links for node in pair})
    best = {node: best_of(node, links) for node in nodes}
    found = {}
    for node in nodes if len(nodes) > 2 else ():
        usual = statistics.median(best[other] for other in nodes if other != node)
        if usual >= SLOW_LINK * best[node]:
            found[node] = usual
    return found


def slow_pairs(links: Links) -> dict[tuple[int, int], float]:
    """Return the links, between nodes that are not slow, that are slow beside the others.

    With the usual bandwidth; from the node first named to the other, the slower direction.
    """
    slow = slow_nodes(links)
    rest = {pair: speed for pair, speed in links.items() if not {*pair} & {*slow}}
    if not rest:
        return {}
    usual = max(rest.values()) if len(rest) == 2 else statistics.median(rest.values())
    return {
        pair: usual
        for pair, speed in rest.items()
        if usual >= SLOW_LINK * speed and speed <= rest[pair[::-1]]
    }


def _both_ways(pair: tuple[int, int], links: Links) -> float:
    return min(links[pair], links[pair[::-1]])


def doubtful_pairs(links: Links) -> list[tuple[int, int]]:
    """Return the pairs to measure again: of a slow node the two best, and the slow ones."""
    found: list[tuple[int, int]] = []
    for node in slow_nodes(links):
        pairs = [(min(pair), max(pair)) for pair in links if node == pair[0]]
        found += sorted(pairs, key=lambda pair: -_both_ways(pair, links))[:2]
    found += [(min(pair), max(pair)) for pair in slow_pairs(links)]
    return [*dict.fromkeys(found)]
