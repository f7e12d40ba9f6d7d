"""Rounds of pairs, and which node, link or rank the self-test names for given measurements."""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.selftest import judge, links
from launcher.selftest.report import Fault, Findings, Member, as_json

USUAL = 1e9  # bytes/s


def all_links(nodes: int, slow: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return links that differ by up to half; `slow` gives some as multiples of the usual."""
    draw = random.Random(nodes)
    return {
        (source, target): USUAL * slow.get((source, target), draw.uniform(0.75, 1.25))
        for source in range(nodes)
        for target in range(nodes)
        if source != target
    }


def slowed(node: int, nodes: int, times: float) -> dict[tuple[int, int], float]:
    pairs = [(node, other) for other in range(nodes) if other != node]
    return {pair: times for one in pairs for pair in (one, one[::-1])}


def find(
    nodes: int, first: judge.Links, later: judge.Links | None = None
) -> tuple[list[list[judge.Pair]], list[int], list[judge.Pair]]:
    """Return the pairs measured in each look but the first, the slow nodes and the slow pairs.

    All looks but the first give `later`, if it is given; each pair must be alone in its round.
    """
    looks: list[list[judge.Pair]] = []

    def measure(rounds: Sequence[Sequence[judge.Pair]]) -> judge.Links:
        assert not looks or all(len(pairs) == 1 for pairs in rounds)
        seen = later if looks and later is not None else first
        looks.append([pair for pairs in rounds for pair in pairs])
        return {both: seen[both] for pair in looks[-1] for both in (pair, pair[::-1])}

    _, slow = judge.find_slow_links(measure, links.rounds(range(nodes)))
    assert len(looks) <= 1 + judge.REPEATS
    named = [link.node for link in slow if link.node is not None]
    return looks[1:], named, [link.pair for link in slow if link.node is None]


@given(st.integers(1, 64))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(nodes: int) -> None:
    rounds = links.rounds(range(nodes))
    assert len(rounds) == (nodes - 1 if nodes % 2 == 0 else nodes) or nodes == 1
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len({*busy})
    met = [(min(pair), max(pair)) for pairs in rounds for pair in pairs]
    assert sorted(met) == [(one, two) for one in range(nodes) for two in range(one + 1, nodes)]


@pytest.mark.parametrize("nodes", [65, 100, 1024])
def test_each_of_very_many_nodes_meets_63_others(nodes: int) -> None:
    rounds = links.rounds(range(nodes))
    assert len(rounds) == 63
    met: dict[int, set[int]] = {node: set() for node in range(nodes)}
    for pair in itertools.chain(*rounds):
        met[pair[0]].add(pair[1])
        met[pair[1]].add(pair[0])
    # With an odd number, one node rests in each round.
    assert {len(others) for others in met.values()} <= {63, 63 - nodes % 2}


def test_a_pair_is_one_of_the_ranks_that_measure() -> None:
    assert links.rounds([0, 8, 16]) == [[(16, 8)], [(0, 16)], [(8, 0)]]


@pytest.mark.parametrize("nodes", [3, 4, 5, 16])
@pytest.mark.parametrize("times", [0.3, 0.1, 0.01])
def test_the_node_behind_a_slow_link_is_named(nodes: int, times: float) -> None:
    for node in range(nodes):
        found = all_links(nodes, slowed(node, nodes, times))
        looks, slow, pairs = find(nodes, found)
        assert (slow, pairs) == ([node], [])
        assert len(looks) == judge.REPEATS
        for pairs in looks:
            assert len(pairs) == 1 and node in pairs[0]

        looks, slow, pairs = find(nodes, found, dict.fromkeys(found, USUAL))
        assert (len(looks), slow, pairs) == (1, [], []), "what is fast by itself is not slow"


def test_two_slow_nodes_of_four_are_both_named() -> None:
    found = all_links(4, {**slowed(1, 4, 0.1), **slowed(3, 4, 0.1)})
    assert find(4, found)[1:] == ([1, 3], [])


@pytest.mark.parametrize("nodes", [3, 4, 16])
@pytest.mark.parametrize("is_sending", [True, False])
def test_a_node_that_is_slow_in_one_direction_is_named(nodes: int, is_sending: bool) -> None:
    ways = {
        pair: times for pair, times in slowed(1, nodes, 0.1).items() if (pair[0] == 1) == is_sending
    }
    assert find(nodes, all_links(nodes, ways))[1:] == ([1], [])


@pytest.mark.parametrize("nodes", [4, 6, 16])
def test_links_are_not_compared_with_faster_ones_inside_a_rack(nodes: int) -> None:
    inside = {(node, node ^ 1): 4.0 for node in range(nodes)}
    assert find(nodes, all_links(nodes, inside)) == ([], [], [])


@pytest.mark.parametrize("nodes", [4, 5, 16])
def test_one_slow_cable_is_named_by_both_its_ends(nodes: int) -> None:
    found = all_links(nodes, {(2, 1): 0.1})
    looks, slow, pairs = find(nodes, found)
    assert (slow, pairs) == ([], [(2, 1)])
    assert looks == [[(2, 1)]] * judge.REPEATS


def test_a_slow_node_is_named_although_every_pair_is_slow() -> None:
    found = all_links(3, {**slowed(2, 3, 0.1), (0, 1): 0.3})
    _, slow, pairs = find(3, found)
    assert (slow, pairs) == ([2], [(0, 1)])


def test_of_two_nodes_only_the_directions_can_be_compared() -> None:
    assert find(2, all_links(2, {(0, 1): 0.1}))[1:] == ([], [(0, 1)])
    assert find(2, all_links(2, slowed(1, 2, 0.1))) == ([], [], [])


@given(st.integers(2, 20))
def test_links_that_differ_by_half_are_healthy(nodes: int) -> None:
    found = all_links(nodes, {})
    assert not judge.slow_links(found)


def test_the_best_of_all_looks_at_a_link_counts() -> None:
    looks = [{(0, 1): 0.3, (2, 3): 0.4, (1, 0): 0.45}, {(2, 3): 0.3}, {(0, 1): 0.3}]
    rounds: list[Sequence[Sequence[judge.Pair]]] = []

    def measure(now: Sequence[Sequence[judge.Pair]]) -> dict[judge.Pair, float]:
        slow = looks[len(rounds)]
        rounds.append(now)
        pairs = [pair for one in now for pair in one]
        return {one: slow.get(one, 1.0) for pair in pairs for one in (pair, pair[::-1])}

    best, slow = judge.find_slow_links(measure, links.rounds(range(4)))
    assert not slow
    assert len(rounds) == 3, "what was fast once is not slow"
    assert set(best.values()) == {1.0}


@pytest.mark.parametrize("crowd", range(7))
def test_among_many_that_seem_slow_only_the_one_that_stays_slow_is_named(crowd: int) -> None:
    first = {p: s for n in range(crowd) for p, s in slowed(n, 16, 0.4).items()}
    found = all_links(16, first | slowed(11, 16, 0.1))
    later = {pair: USUAL / 10 if 11 in pair else USUAL for pair in found}
    looks, slow, pairs = find(16, found, later)
    assert (slow, pairs) == ([11], [])
    assert len(looks[0]) == crowd + 1, "a slow node is measured by its best link"


def test_every_one_of_many_slow_nodes_is_named() -> None:
    slow = [*range(20, 30)]
    found = all_links(30, {p: s for node in slow for p, s in slowed(node, 30, 0.1).items()})
    assert find(30, found)[1:] == (slow, [])


@pytest.mark.parametrize("still_slow", [0, 1, 3])
def test_of_a_crowd_only_the_slowest_are_measured_again_and_can_be_named(still_slow: int) -> None:
    lonely = slowed(0, 16, 0.3)  # not even its best link is fast, though it is faster than others
    cables = {(node, node + 8): 0.01 * node for node in range(1, still_slow + 1)}
    crowd = {(a, b): 0.1 for a in range(1, 8) for b in range(8, 16)} | lonely
    first = all_links(16, crowd | cables)
    looks, slow, pairs = find(16, first, all_links(16, cables))
    assert (slow, {*pairs}) == ([], {*cables})
    later = judge.REPEATS - 1 if still_slow else 0
    assert [len(look) for look in looks] == [judge.MOST_LINKS + 1, *[still_slow] * later]


@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
def test_a_slow_rank_is_named(ranks: int) -> None:
    for slow in range(ranks):
        speeds = [66.0 if rank == slow else 100.0 + rank for rank in range(ranks)]
        assert [*judge.slow_ranks(speeds, ["cpu"] * ranks)] == [slow]
    assert not judge.slow_ranks([84.0 + 16 * (rank % 2) for rank in range(ranks)], ["cpu"] * ranks)


@given(st.lists(st.floats(1.0, 10.0), min_size=1, max_size=9))
def test_a_rank_is_compared_with_the_median(speeds: list[float]) -> None:
    usual = sorted(speeds)[len(speeds) // 2]
    slow = {rank: usual / speed for rank, speed in enumerate(speeds) if usual / speed >= 1.2}
    assert judge.slow_ranks(speeds, ["cpu"] * len(speeds)) == slow


def test_two_slow_ranks_of_four_are_both_named() -> None:
    assert [*judge.slow_ranks([100.0, 80.0, 100.0, 75.0], ["cpu"] * 4)] == [1, 3]


# GFLOP/s of four ranks that other programs disturb; in SLOWED*, rank 2 is also 1.5 times slower.
DISTURBED = ([64.0, 77.0, 93.0, 91.0], [95.0, 60.0, 90.0, 94.0], [70.0, 93.0, 92.0, 63.0])
SLOWED = ([64.1, 77.3, 61.6, 91.7], [92.0, 96.0, 63.0, 72.0], [70.0, 94.0, 60.0, 95.0])
DISTURBED_FOR_LONG = (*([60.0, 95.0, 95.0, 95.0],) * 9, [94.0, 95.0, 95.0, 95.0])
SLOWED_LIKE_OTHERS = ([51.5, 46.9, 58.0, 55.3], [95.0, 94.0, 62.0, 96.0])
SLOWED_AT_FIRST = ([96.0, 95.0, 48.0, 96.0], [60.0, 50.0, 62.0, 70.0], [93.0, 70.0, 61.0, 94.0])


@pytest.mark.parametrize(
    ("looks", "found"),
    [
        (DISTURBED, []),
        (DISTURBED_FOR_LONG, []),
        (SLOWED, [2]),
        (SLOWED_LIKE_OTHERS, [2]),
        (SLOWED_AT_FIRST, [2]),
    ],
)
def test_the_best_of_all_looks_counts(looks: Sequence[list[float]], found: list[int]) -> None:
    left = itertools.cycle(looks)
    best, slow = judge.find_slow_ranks(lambda: next(left), ["cpu"] * 4)
    assert [*slow] == found
    assert best == [max(speeds) for speeds in zip(*looks, strict=True)]


def test_ranks_are_compared_with_others_on_the_same_device() -> None:
    kinds = ["H100", "H100", "A100", "A100"]
    assert not judge.slow_ranks([900.0, 910.0, 300.0, 310.0], kinds)
    assert [*judge.slow_ranks([900.0, 910.0, 300.0, 150.0], kinds)] == [3]


HOSTS = ["a", "b", "c", "d"]
MEMBERS = [Member(host, node, 0, "cpu", "2.13") for node, host in enumerate(HOSTS)]


def test_a_fault_names_hosts_and_what_to_leave_out() -> None:
    found = all_links(4, slowed(2, 4, 0.01))
    findings = Findings(MEMBERS, found, {3: 1.52}, judge.slow_links(found))
    rank, link = map(str, findings.faults())
    assert link.startswith("c has a slow link: 10.00 MB/s at best; other nodes have ")
    assert link.endswith(" [slow-link]")
    assert rank == "rank 3 (d) takes 1.52 times as long to compute as others [slow-rank]"
    assert findings.excluded() == ["c", "d"]


def test_a_program_reads_the_faults_as_they_are_printed() -> None:
    wrong = Fault("wrong-result", "broadcast on rank 0 (a) gave 4, expected 3", "a")
    members = [replace(MEMBERS[0], faults=[wrong]), *MEMBERS[1:]]
    content = json.loads(as_json(Findings(members), "FAIL", passed=False))
    text = "broadcast on rank 0 (a) gave 4, expected 3 [wrong-result]"
    assert content["faults"] == content["ranks"][0]["faults"] == [text]
    assert content["exclude"] == ["a"]


def test_if_every_host_has_a_fault_none_is_to_be_excluded() -> None:
    slow = dict.fromkeys(range(4), 1.5)
    assert Findings(MEMBERS, slow_ranks=slow).excluded() == []
    del slow[1]
    assert Findings(MEMBERS, slow_ranks=slow).excluded() == ["a", "c", "d"]


def test_a_slow_rank_is_not_blamed_on_another_nodes_links() -> None:
    found = all_links(4, {(1, 2): 0.3, (2, 3): 0.3, (0, 1): 0.3})
    pairs = judge.slow_links(found)
    assert {link.pair for link in pairs} == {(1, 2), (2, 3), (0, 1)}
    healthy = Findings(MEMBERS, found, {}, pairs)
    assert healthy.excluded() == ["b", "c", "d"]
    slow = Findings(MEMBERS, found, {2: 2.64}, pairs)
    assert slow.excluded() == ["b", "c"]


def test_gpus_of_one_model_are_of_one_kind() -> None:
    devices = ["cuda:0 NVIDIA H100 80GB", "cuda:7 NVIDIA H100 80GB", "cuda:0 NVIDIA A100", "cpu"]
    kinds = [Member("a", 0, 0, device, "2.13").kind for device in devices]
    assert kinds == ["NVIDIA H100 80GB", "NVIDIA H100 80GB", "NVIDIA A100", "cpu"]


def test_versions_that_differ_blame_no_host() -> None:
    members = [Member("a", 0, 0, "cpu", "2.12"), MEMBERS[1]]
    (fault,) = Findings(members).faults()
    cause = "torch 2.12 on a, torch 2.13 on b; install one version everywhere"
    assert fault == Fault("version-mismatch", cause, host="")
