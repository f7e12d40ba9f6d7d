"""A copy of rank 0's newest snapshot on another node, which that of its own node outlives.

It goes over the agents' link, in pieces between which there is time for everything else.
"""

from __future__ import annotations

import base64
import math
import os
import time
from collections.abc import Mapping, Sequence

from distributed.snapshot import BEGIN, Buffer, Header
from launcher import processes
from launcher.agent.control import BEAT_S
from launcher.agent.protocol import Peer, SnapshotPiece

PIECE = 1 << 17  # bytes
_PIECE_S = 0.008  # between two: 16 MB/s at most
_AT_ONCE = 1 << 23  # bytes


class Outgoing:
    """The pieces of the newest snapshot in some buffers, from a copy that its rank leaves alone."""

    def __init__(self, buffers: Sequence[Buffer], *, has_others: bool) -> None:
        self._buffers = buffers
        self._image: Buffer | None = None
        self._header = Header()  # of the image
        self._at = 0  # the next piece; 0: all have been taken
        self.next_at = time.monotonic() if has_others else math.inf

    def on_time(self, peers: Mapping[int, Peer]) -> None:
        """Send the next piece to the first of the other nodes, if it is time to, and if it can."""
        if time.monotonic() < self.next_at or not peers:
            return
        peer = peers[min(peers)]
        piece = None if peer.is_busy else self.next_piece()
        if piece is not None:
            peer.send(piece)
        self.next_at = time.monotonic() + (_PIECE_S if piece or peer.is_busy else BEAT_S)

    def next_piece(self) -> SnapshotPiece | None:
        """Return the next piece; the header is the last. None where there is nothing new."""
        if not self._at and not self._begin():
            return None
        assert self._image is not None
        end = min(self._at + PIECE, self._header.size)
        if self._at == self._header.size:
            start, end, self._at = 0, BEGIN, 0
        else:
            start, self._at = self._at, end
        data = base64.b64encode(os.pread(self._image.fd, end - start, start)).decode()
        return SnapshotPiece(self._header.step, start, self._header.size, data)

    def _begin(self) -> bool:
        """Copy the newest complete snapshot; returns whether there is one that is new."""
        newest = max(self._buffers, key=lambda one: one.header().step)
        header = newest.header()
        if header.checksum < 0 or header.holders > 1 or header.step <= self._header.step:
            return False
        self._image = self._image or Buffer(processes.anonymous_file("snapshot"))
        os.ftruncate(self._image.fd, header.size)
        for start in range(0, header.size, _AT_ONCE):
            os.pwrite(self._image.fd, os.pread(newest.fd, _AT_ONCE, start), start)
        if newest.header() != header:  # the rank has begun to overwrite it
            return False
        self._header, self._at = header, BEGIN
        return True


class Incoming:
    """Another node's snapshot: the newest that has arrived in full, and the one on its way."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._next: Buffer | None = None

    def take(self, piece: SnapshotPiece) -> None:
        """Keep a piece. With the last, the snapshot counts."""
        if not self.buffers:
            self.buffers = [Buffer(processes.anonymous_file("snapshot")) for _ in range(2)]
        if piece.offset == BEGIN:
            self._next = min(self.buffers, key=lambda one: one.header().step)
            os.ftruncate(self._next.fd, 0)
        if self._next is not None:  # else it began before this agent was there
            os.pwrite(self._next.fd, base64.b64decode(piece.data), piece.offset)
