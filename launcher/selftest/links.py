"""Latency and bandwidth between pairs of nodes, measured in rounds of disjoint pairs.

Each transfer is as large as the link allows in the time available, so that a link a thousand times
slower than the others takes no longer to measure.
"""

import statistics
import time
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
SMALLEST, LARGEST = 2**16, 2**26  # bytes of one transfer
_MOST_PINGS = 5
_DATA_SHARE = 0.75  # of the time: pings must leave so much for data
_GROWTH = 4  # times: from one size of a transfer to the next
# Special sizes of a transfer.
_PING = -1  # answer at once
_END = 0  # no transfer follows


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
    latency: float  # s, of an empty message


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
        peer = nodes[target if me == source else source]
        try:
            if me == source:
                yield Link(way, *_measure_way(peer.rank, seconds / 2))
            else:
                _answer_transfers(peer.rank)
        except RuntimeError as error:
            names = f"{nodes[source].host} to {nodes[target].host}"
            cause = f"no data from {names} within {limits.TRANSFER_S:g} s"
            raise barrier.give_up(Fault("slow-link", cause)) from error


def _measure_way(peer: int, seconds: float) -> tuple[float, float]:
    """Return the bytes/s to a peer, and the latency in s, measured for `seconds`.

    Makes larger and larger transfers. Only the largest count, because a rate limit on a link lets
    short bursts pass. Raises RuntimeError if a transfer takes longer than TRANSFER_S.
    """
    word = torch.zeros(1, dtype=torch.int64, device=device())
    deadline = time.monotonic() + seconds
    latency = _measure_latency(peer, word, deadline - _DATA_SHARE * seconds)

    size = SMALLEST
    took = []  # seconds of each transfer of this size
    while True:
        data = torch.empty(size, dtype=torch.uint8, device=device())
        whole = _time_transfer(peer, word.fill_(size), data)
        took.append(max(whole - latency, whole / 2))  # every ping may have been late
        left = deadline - time.monotonic()
        if left < took[-1]:
            break
        if size < LARGEST and left > 2 * _GROWTH * took[-1]:
            size *= _GROWTH
            took = []

    _transfer(word.fill_(_END), peer, is_sending=True)
    return size / statistics.median(took), latency


def _measure_latency(peer: int, word: Tensor, until: float) -> float:
    """Return half the time of the fastest ping, in s. Sends one, and more until `until`."""
    pings = list[float]()
    while not pings or (len(pings) < _MOST_PINGS and time.monotonic() < until):
        pings.append(_time_transfer(peer, word.fill_(_PING), None))
    return min(pings) / 2


def _time_transfer(peer: int, size: Tensor, data: Tensor | None) -> float:
    """Return the seconds from the announcement of some data to the reply that it has arrived."""
    start = time.perf_counter()
    _transfer(size, peer, is_sending=True)
    if data is not None:
        _transfer(data, peer, is_sending=True)
    _transfer(size, peer, is_sending=False)
    return time.perf_counter() - start


def _answer_transfers(peer: int) -> None:
    """Take part in the transfers of a peer's _measure_way(), until it ends them.

    Raises RuntimeError if a transfer takes longer than TRANSFER_S.
    """
    size = torch.zeros(1, dtype=torch.int64, device=device())
    while True:
        _transfer(size, peer, is_sending=False)
        if size.item() == _END:
            return
        if size.item() != _PING:
            data = torch.empty(int(size.item()), dtype=torch.uint8, device=device())
            _transfer(data, peer, is_sending=False)
        _transfer(size, peer, is_sending=True)


def _transfer(data: Tensor, peer: int, *, is_sending: bool) -> None:
    """Send or receive in the group of all ranks: NCCL would make a group for each pair."""
    operation = dist.P2POp(dist.isend if is_sending else dist.irecv, data, peer)
    for request in dist.batch_isend_irecv([operation]):
        request.wait(timedelta(seconds=limits.TRANSFER_S))
    if device().type == "cuda":
        torch.cuda.synchronize()
