"""Latency and bandwidth between pairs of nodes, measured in rounds of disjoint pairs.

Each transfer is as large as the link allows in the time available, so that a link a thousand times
slower than the others takes no longer to measure.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.torch import device
from launcher.selftest.barrier import Barrier
from launcher.selftest.judge import Pair
from launcher.selftest.report import Fault
from launcher.wire import limits

MOST_ROUNDS = 63  # enough for every pair of 64 nodes; more nodes have so many partners each
FIRST, SMALLEST, LARGEST = 2**12, 2**16, 2**26  # bytes; below SMALLEST, only the latency counts
_GROWTH = 4  # times: from one size of a transfer to the next


@dataclass(frozen=True)
class Node:
    """A node of the test, and the rank that measures its links."""

    host: str
    rank: int


@dataclass(frozen=True)
class Link:
    """One direction between two nodes."""

    pair: Pair  # from the first to the second
    bandwidth: float  # bytes/s
    latency: float  # s, of a small message


def rounds(nodes: int) -> list[list[Pair]]:
    """Return rounds of disjoint pairs of nodes: every pair once, as far as MOST_ROUNDS allows.

    This is the circle method: one node stays, and the others move on by one place each round.
    """
    players = [*range(nodes), *[-1] * (nodes % 2)]  # -1: its partner rests
    all_rounds = []
    for _ in range(min(len(players) - 1, MOST_ROUNDS)):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        all_rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    return all_rounds


def measure(
    nodes: Sequence[Node], plan: Iterable[Sequence[Pair]], me: int, barrier: Barrier, seconds: float
) -> Iterator[Link]:
    """Yield the links from node number `me`, round by round; one rank of each node calls this.

    Each pair is measured for about `seconds`. Raises StuckError if a transfer does not end.
    """
    for pairs in plan:
        for pair in pairs:
            if me in pair:
                yield from _measure_pair(nodes, pair, me, barrier, seconds)
        barrier.wait_for_all("a round of pairs", 2 * limits.TRANSFER_S + seconds)


def _measure_pair(
    nodes: Sequence[Node], pair: Pair, me: int, barrier: Barrier, seconds: float
) -> Iterator[Link]:
    """Measure both directions, one after the other. Yields the link from node number `me`.

    Raises StuckError if a transfer does not end in time; other ranks then raise it at a barrier.
    """
    for way in (pair, pair[::-1]):
        source, target = way
        is_source = me == source
        peer = nodes[target if is_source else source]
        try:
            measured = _measure_way(peer.rank, seconds / 2, is_source=is_source)
        except RuntimeError as error:
            names = f"{nodes[source].host} to {nodes[target].host}"
            cause = f"no data from {names} within {limits.TRANSFER_S:g} s"
            raise barrier.give_up(Fault("slow-link", cause)) from error
        if is_source:
            yield Link(way, *measured)


def _measure_way(peer: int, seconds: float, *, is_source: bool) -> tuple[float, float]:
    """Return the bytes/s from the source to its peer, and the latency in s. Both call this.

    The source makes larger and larger transfers; the target answers each with the size of the next.
    Only the largest count, because a rate limit on a link lets short bursts pass. Raises
    RuntimeError if a transfer takes longer than TRANSFER_S.
    """
    answer = torch.zeros(1, dtype=torch.int64, device=device())
    took = defaultdict[int, list[float]](list)  # seconds, by size
    size = FIRST
    while size:
        if size < SMALLEST:  # the first transfers may have to make a connection
            deadline = time.monotonic() + seconds
        data = torch.empty(size, dtype=torch.uint8, device=device())
        start = time.perf_counter()
        _transfer(data, peer, is_sending=is_source)
        if not is_source:
            answer.fill_(_next_size(size, time.perf_counter() - start, deadline))
        _transfer(answer, peer, is_sending=not is_source)
        took[size].append(time.perf_counter() - start)
        size = int(answer.item())

    largest = max(took)
    latency = min(map(min, took.values())) / 2
    return largest / statistics.median(took[largest]), latency


def _next_size(size: int, took: float, deadline: float) -> int:
    """Return the size of the next transfer, after one that took so many seconds; 0: the end."""
    left = deadline - time.monotonic()
    if size < SMALLEST or (size < LARGEST and left > 2 * _GROWTH * took):
        return size * _GROWTH
    return size if left > took else 0


def _transfer(data: Tensor, peer: int, *, is_sending: bool) -> None:
    """Send or receive in the group of all ranks: NCCL would make a group for each pair."""
    operation = dist.P2POp(dist.isend if is_sending else dist.irecv, data, peer)
    for request in dist.batch_isend_irecv([operation]):
        request.wait(timedelta(seconds=limits.TRANSFER_S))
    if device().type == "cuda":
        torch.cuda.synchronize()
