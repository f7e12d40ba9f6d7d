"""A copy of rank 0's newest snapshot on another node, which that of its own node outlives.

It goes over the agents' link, in pieces between which there is time for everything else.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence

from distributed.snapshot_memory import BEGIN, Memory
from launcher import processes
from launcher.agent.nodes.protocol import Peer, SnapshotData, SnapshotPiece

PIECE = 1 << 17  # bytes
_PIECE_S = 0.002  # between two: 64 MB/s at most
_LOOK_S = 0.1  # between two looks for a newer snapshot
_AT_ONCE = 1 << 23  # bytes


class Outgoing:
    """Sends the newest snapshot in some buffers to another node, a small part at a time."""

    def __init__(self, buffers: Sequence[Memory]) -> None:
        """Send nothing before `begin`."""
        self._buffers = buffers
        self._parts = self.parts()
        self.rest_s = 0.0  # until the next part
        self.next_at = math.inf

    def begin(self) -> None:
        """Send from now on: this is the first of several nodes, and another keeps a copy."""
        self.next_at = time.monotonic()

    def on_time(self, peers: Mapping[int, Peer]) -> None:
        """Do the next part, if it is time to and the first of the other nodes can take it."""
        now = time.monotonic()
        if now < self.next_at:
            return
        self.next_at = now + _PIECE_S
        if peers and not (peer := peers[min(peers)]).is_busy:
            if piece := next(self._parts):
                peer.send(piece)
            self.next_at = now + self.rest_s

    def parts(self) -> Iterator[SnapshotData | None]:
        """Yield the pieces of each new snapshot, the header last; None where none is ready.

        They come from a copy that the rank leaves alone.
        """
        image, sent_step = processes.anonymous_file("snapshot"), -1
        while True:
            newest = max(self._buffers, key=lambda one: one.header().step)
            header = newest.header()
            if header.checksum < 0 or header.holders > 1 or header.step <= sent_step:
                self.rest_s = _LOOK_S
                yield None
                continue
            self.rest_s = _PIECE_S
            for start in range(0, header.size, _AT_ONCE):
                os.pwrite(image, os.pread(newest.fd, _AT_ONCE, start), start)
                yield None
            if newest.header() != header:  # its rank has begun to overwrite it
                continue
            for start in (*range(BEGIN, header.size, PIECE), 0):
                data = os.pread(image, min(PIECE, header.size - start) if start else BEGIN, start)
                yield SnapshotData(SnapshotPiece(header.step, start, len(data), header.size), data)
            sent_step = header.step


class Incoming:
    """Another node's snapshot: the newest that has arrived in full, and the one on its way."""

    def __init__(self) -> None:
        self.buffers: list[Memory] = []
        self._next: Memory | None = None

    def take(self, arrived: SnapshotData) -> None:
        """Keep a piece. With the last, the snapshot counts."""
        if not self.buffers:
            self.buffers = [Memory(processes.anonymous_file("snapshot")) for _ in range(2)]
        offset = arrived.piece.offset
        if offset == BEGIN:
            self._next = min(self.buffers, key=lambda one: one.header().step)
            os.ftruncate(self._next.fd, 0)
        if self._next is not None:  # else it began before this agent was there
            os.pwrite(self._next.fd, arrived.data, offset)
