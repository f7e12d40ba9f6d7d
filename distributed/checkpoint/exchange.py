"""Copy each rank's part of a sharded snapshot to the next node, in case a node is lost.

The parts go from rank to rank, not over the node agents' links: those all lead to node rank 0,
which would have to relay every part.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .. import limits
from ..collectives import gather_json, gloo_group
from .memory import BEGIN, Header, Memory, choose_buffer, whole_steps

_PIECE = 1 << 22  # bytes
_PATIENCE = timedelta(seconds=25)  # for one transfer, which all ranks begin after the same step
_log = logging.getLogger(__name__)


class Neighbours:
    """The ranks with the same local rank on the next node and on the previous one.

    A rank that cannot reach them stops exchanging snapshots. Its neighbours wait for it once, then
    stop too.
    """

    def __init__(self) -> None:
        """Create the process group for the transfers. All ranks must call this.

        With one node, or unequal numbers of ranks per node, there are no neighbours: the methods
        then do nothing.
        """
        self.moved = 0  # pieces exchanged so far, by which a waiting rank sees progress
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks
        by_rank = gather_json(on_node)
        world = len(by_rank)
        self._are_reachable = len({*by_rank}) == 1 and on_node < world
        if self._are_reachable:
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
            self._next = (dist.get_rank() + on_node) % world
            self._last = (dist.get_rank() - on_node) % world

    def meet(self) -> None:
        """Wait until the previous exchange is over on all ranks; after 25 s, exchange no more."""
        if self._are_reachable:
            with self._may_be_lost():
                dist.barrier(self._group)

    def exchange(self, mine: Memory, copies: Sequence[Memory]) -> None:
        """Send a buffer to the next node, and keep the previous node's in one of `copies`.

        Takes long, because it pauses between pieces: training goes first. Stops early if the
        program exits. After an error, it logs a warning, and later calls do nothing.
        """
        if self._are_reachable:
            with self._may_be_lost():
                theirs = choose_buffer(copies, mine.header().step)
                for _ in _transfer(self._group, mine, self._next, theirs, self._last):
                    self.moved += 1
                    time.sleep(limits.SNAPSHOT_PIECE_S)
                    if not threading.main_thread().is_alive():
                        return

    @contextlib.contextmanager
    def _may_be_lost(self) -> Iterator[None]:
        """After an error in the body, log a warning and continue without the neighbours."""
        try:
            yield
        except Exception as error:
            self._are_reachable = False
            if threading.main_thread().is_alive():
                _log.warning("snapshots are no longer copied to the next node: %s", error)


def agree_on_step(
    own: Sequence[Header], copies: Sequence[Header]
) -> tuple[int, list[tuple[int, int]]]:
    """Return the newest step for which every part exists, or -1 without one.

    Also return the ranks that lack their part, each with a rank that holds a copy. `own` has the
    headers of this rank's parts, `copies` those of the parts that it holds for another rank. All
    ranks must call this.
    """
    mine = [[[one.step, one.rank, one.holders] for one in headers] for headers in (own, copies)]
    rows = gather_json(mine)  # of each rank: its own parts, then its copies
    ranks = len(rows)

    # By rank: the steps of its own parts, each with the number of holders. With one holder, rank 0
    # has all of it. A sharded snapshot of another number of ranks does not count.
    held = [{step: n for step, _, n in parts if n in (1, ranks)} for parts, _ in rows]
    keeper_of = dict[tuple[int, int], int]()  # of a copy, by its step and the rank of the part
    for keeper, (_, copied) in enumerate(rows):
        keeper_of |= {(step, rank): keeper for step, rank, n in copied if n == ranks}

    available = [{**steps} for steps in held]  # what each rank has, or can get from a copy
    for step, rank in keeper_of:
        available[rank].setdefault(step, ranks)
    newest = max([-1, *whole_steps(available)])

    lacking = [rank for rank, steps in enumerate(held) if newest not in steps]
    return newest, [(n, keeper_of[newest, n]) for n in lacking if (newest, n) in keeper_of]


def deliver_copies(lacking: Sequence[tuple[int, int]], copy: Memory | None, own: Memory) -> None:
    """Send copies of lost parts to the ranks that need them. All ranks must call this.

    `lacking` pairs each of these ranks with the rank whose `copy` holds the lost part. `own` is the
    buffer that receives this rank's part.
    """
    group = gloo_group()
    for rank, holder in lacking:
        if dist.get_rank() == holder:
            list(_transfer(group, mine=copy, to=rank))  # sends all pieces
        elif dist.get_rank() == rank:
            list(_transfer(group, theirs=own, source=holder))  # receives all pieces
    dist.barrier(group)  # a rank that left now would cut off ranks that are connecting
    dist.destroy_process_group(group)


def _transfer(
    group: dist.ProcessGroup,
    mine: Memory | None = None,
    to: int = -1,
    theirs: Memory | None = None,
    source: int = -1,
) -> Iterator[None]:
    """Send the buffer `mine` to the rank `to`, and receive `theirs` from `source`, piece by piece.

    Yields after each piece, so that the caller can pause. Without one of the buffers, it only sends
    or only receives. The size comes first. The header comes last: until then, the received buffer
    counts as empty.
    """

    def swap(out: Tensor, into: Tensor) -> None:
        """Send and receive one piece at the same time; wait for both."""
        works = []
        if mine is not None and out.numel():
            works.append(dist.isend(out, to, group))
        if theirs is not None and into.numel():
            works.append(dist.irecv(into, source, group))
        for work in filter(None, works):  # torch's type includes None, for ranks outside the group
            work.wait()

    own_size = torch.tensor([mine.header().size if mine else 0])
    their_size = torch.zeros(1, dtype=torch.int64)
    swap(own_size, their_size)
    if theirs is not None:
        theirs.set_header(Header())
        os.ftruncate(theirs.fd, int(their_size))

    out = _content(mine, int(own_size))
    into = _content(theirs, int(their_size))
    for start in range(BEGIN, int(max(own_size, their_size)), _PIECE):
        swap(out[start : start + _PIECE], into[start : start + _PIECE])
        yield

    header = torch.empty(BEGIN, dtype=torch.uint8)
    swap(out[:BEGIN], header)
    if theirs is not None:
        into[:BEGIN] = header


def _content(memory: Memory | None, size: int) -> Tensor:
    """Return the bytes of a buffer, not a copy of them; an empty tensor without a buffer."""
    if memory is None:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(memory.fd, size), dtype=torch.uint8)
