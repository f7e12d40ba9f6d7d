"""Latency and bandwidth between pairs of nodes, measured in rounds of disjoint pairs.

Each transfer is as large as the link allows in the time available, so that a link a thousand times
slower than the others takes no longer to measure.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.torch import device
from launcher.selftest.barrier import Barrier
from launcher.selftest.judge import Pair, Rounds
from launcher.selftest.report import Fault
from launcher.wire import limits

MOST_ROUNDS = 63  # enough for every pair of 64 nodes; more nodes have so many partners each
FIRST, SMALLEST, LARGEST = 2**12, 2**16, 2**26  # bytes; below SMALLEST, only the latency counts
_GROWTH = 4  # times: from one size of a transfer to the next


@dataclass(frozen=True)
class Link:
    """One direction between two nodes."""

    pair: Pair  # from the first to the second
    bandwidth: float  # bytes/s
    latency: float  # s, of a small message


def rounds(nodes: Sequence[int]) -> list[list[Pair]]:
    """Return rounds of disjoint pairs of nodes: every pair once, as far as MOST_ROUNDS allows.

    This is the circle method: an odd number of nodes stand in a circle, which each round folds at
    another node. The two that then lie on each other meet. The node at the fold rests; of an even
    number, it meets the last node, which is not in the circle.
    """
    is_odd = len(nodes) % 2
    circle = nodes if is_odd else nodes[:-1]
    size = len(circle)
    all_rounds = []
    for fold in range(min(size, MOST_ROUNDS)):
        steps = range(1, (size + 1) // 2)
        pairs = [(circle[fold - step], circle[(fold + step) % size]) for step in steps]
        all_rounds.append(pairs if is_odd else [*pairs, (circle[fold], nodes[-1])])
    return all_rounds


def measure(
    plan: Rounds, me: int, hosts: Sequence[str], barrier: Barrier, seconds: float
) -> Iterator[Link]:
    """Yield the links from rank `me`, round by round; one rank of each node calls this.

    The directions of each pair are measured one after the other, for about `seconds` in all.
    `hosts` are those of all ranks. Raises StuckError if a transfer does not end in time; other
    ranks then raise it at the barrier.
    """
    for pairs in plan:
        ways = [way for pair in pairs if me in pair for way in (pair, pair[::-1])]
        for source, target in ways:
            is_source = source == me
            peer = target if is_source else source
            try:
                measured = _measure_way(peer, seconds / 2, is_source=is_source)
            except RuntimeError as error:
                cause = (
                    f"no data from {hosts[source]} to {hosts[target]} in {limits.TRANSFER_S:g} s"
                )
                raise barrier.give_up(Fault("slow-link", cause)) from error
            if is_source:
                yield Link((source, target), *measured)

        barrier.wait_for_all("a round of pairs", 2 * limits.TRANSFER_S + seconds)


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
