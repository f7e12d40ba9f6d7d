"""Decides which nodes or ranks are slower than the others, from all measurements."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

SLOW_RANK = 1.3  # times the others' time
SUSPECT = 1.1  # times; if a rank is that slow, all are measured again
RANK_REPEATS = 12  # more measurements while one seems slow: others may interfere for seconds
LINK_REPEATS = 6  # the same for links
SLOW_LINK = 2.0  # times
MOST_AGAIN = 6  # suspects that are measured again in one look: those with the fewest, the slowest
Pair = tuple[int, int]  # numbers of nodes
Rounds = Sequence[Sequence[Pair]]  # of disjoint pairs
Links = Mapping[Pair, float]  # bytes/s from the first to the second


def find_slow_ranks(
    compute: Callable[[], list[float]], kinds: Sequence[str]
) -> tuple[list[float], dict[int, float]]:
    """Return each rank's speed, and how many times slower each slow rank is.

    `compute` measures the speeds of all ranks; `kinds` has the models of their devices.
    Interference makes a rank slower, never faster, so the best of all measurements counts.
    """
    best = compute()
    for _ in range(RANK_REPEATS):
        if not slow_ranks(best, kinds, SUSPECT):
            break
        best = [*map(max, best, compute())]
    return best, slow_ranks(best, kinds)


def slow_ranks(
    speeds: Sequence[float], kinds: Sequence[str], least: float = SLOW_RANK
) -> dict[int, float]:
    """Return the ranks that are slower than others on the same kind of device, and by how much."""
    slow = dict[int, float]()
    for kind in dict.fromkeys(kinds):
        alike = {rank: speed for rank, speed in enumerate(speeds) if kinds[rank] == kind}
        slow |= {rank: usual / speeds[rank] for rank, usual in find_slow(alike, least).items()}
    return slow


def find_slow(speeds: Mapping[int, float], times: float) -> dict[int, float]:
    """Return those that are `times` slower than the median of all others, each with that median.

    They are given by number: of ranks, or of nodes. All are sorted once: a median of the others for
    each would take minutes with thousands of ranks.
    """
    num_others = len(speeds) - 1
    if num_others < 1:
        return {}

    in_order = sorted(speeds, key=speeds.__getitem__)
    middle = (num_others - 1) // 2, num_others // 2  # the places of the median, among the others
    slow = {}
    for place, one in enumerate(in_order):
        # Without this one, those behind it move up by one place.
        halfway = [in_order[at if at < place else at + 1] for at in middle]
        usual = statistics.mean(speeds[other] for other in halfway)
        if usual >= times * speeds[one]:
            slow[one] = usual
    return dict(sorted(slow.items()))


def find_slow_links(
    measure: Callable[[Rounds], Links], rounds: Rounds
) -> tuple[Links, dict[int, float], dict[Pair, float]]:
    """Return the links, the slow nodes and the slow pairs, each with the usual bandwidth.

    1. `measure` measures all `rounds`; each round has pairs that are measured at the same time.
    2. Each link that seems slow (of a slow node, its best link) is measured again by itself, the
       slowest first, up to MOST_AGAIN in one look. The best measurement of a link counts.
    3. If at least half of those are fast then, other pairs had slowed them down. Links that seemed
       less slow, and were not measured again, are no longer suspects either.
    """
    best = dict(measure(rounds))
    nodes = slow_nodes(best)
    pairs = slow_pairs(best)
    fastest = best_links(best)
    usual_speeds = pairs | {fastest[node]: usual for node, usual in nodes.items()}

    def times_slower(pair: Pair) -> float:
        """Return how many times slower than usual a link is, by its best measurement so far."""
        return usual_speeds[pair] / slower_way(pair, best)

    suspects = {*usual_speeds}
    looks = Counter[Pair]()
    for _ in range(LINK_REPEATS):
        chosen = sorted(suspects, key=lambda pair: (looks[pair], -times_slower(pair)))[:MOST_AGAIN]
        if not chosen:
            break

        looks.update(chosen)
        latest = measure([[pair] for pair in chosen])
        best |= {pair: max(speed, best[pair]) for pair, speed in latest.items()}
        suspects = {pair for pair in suspects if times_slower(pair) >= SLOW_LINK}
        still_slow = suspects & {*chosen}
        if 2 * len(still_slow) <= len(chosen):  # clear those that were not measured again
            suspects &= looks.keys()

    slow = {node: usual for node, usual in nodes.items() if fastest[node] in suspects}
    return best, slow, {pair: usual for pair, usual in pairs.items() if pair in suspects}


def best_links(links: Links) -> dict[int, Pair]:
    """Return each node's best link: the one that is fastest in its slower direction."""
    best = dict[int, Pair]()
    for pair in sorted(links, key=lambda pair: slower_way(pair, links)):
        best |= dict.fromkeys(pair, pair)  # of both nodes, until a faster link follows
    return best


def slow_nodes(links: Links) -> dict[int, float]:
    """Return the nodes whose best link is slow, with the median of the other nodes' best links.

    Two nodes have only one link, so neither can be singled out.
    """
    speeds = {node: slower_way(pair, links) for node, pair in best_links(links).items()}
    return find_slow(speeds, SLOW_LINK) if len(speeds) > 2 else {}


def slow_pairs(links: Links) -> dict[Pair, float]:
    """Return each slow link with the usual bandwidth, except the links of slow nodes.

    Each link is given as source and target, in the slower of the two directions.
    """
    slow = slow_nodes(links)
    rest = {pair: speed for pair, speed in links.items() if not {*pair} & {*slow}}
    if not rest:
        return {}

    # A median of the two directions of one link would hide that one of them is slow.
    usual = max(rest.values()) if len(rest) == 2 else statistics.median(rest.values())
    return {
        pair: usual
        for pair, speed in rest.items()
        if usual >= SLOW_LINK * speed and speed <= rest[pair[::-1]]
    }


def slower_way(pair: Pair, links: Links) -> float:
    """Return the bandwidth of a link in the slower of the two directions."""
    return min(links[pair], links[pair[::-1]])
