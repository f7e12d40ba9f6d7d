"""The memory of a snapshot, and its layout (no torch).

The node agent owns it, so it outlives the ranks. Each rank has two buffers there and fills them in
turn: if it dies while it is filling one, the other is still complete. Two more hold the part of a
sharded snapshot that belongs to a rank on another node.

    header      the step, how many ranks hold a part of it, the sizes, and a checksum
    tensors     the content of each, at a multiple of 64 bytes
    rest        the state without that content, as torch.save writes it

A buffer is valid as soon as its header is written; the checksum follows in the background.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

FILES = "SNAPSHOT_FILES"  # the variable in which the agent gives a rank its buffers
BEGIN = 64  # where the tensors begin
_MAGIC = b"snapshot"
_HEADER = struct.Struct("<8s6q")


class Header(NamedTuple):
    """The header of a buffer. Step -1 means that the buffer is empty."""

    magic: bytes = _MAGIC
    step: int = -1
    holders: int = 0  # ranks that each hold a part; 1: rank 0 holds all
    rank: int = 0  # whose part it is
    rest: int = 0  # where the rest begins
    size: int = 0  # of everything, in bytes
    checksum: int = -1  # CRC-32 of all that follows the header; -1: not known yet


AnyMemory = TypeVar("AnyMemory", bound="Memory")


class Memory:
    """A file in memory with one rank's part of one snapshot."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def header(self) -> Header:
        """Return the header; that of an empty buffer if none has been written."""
        data = os.pread(self.fd, _HEADER.size, 0)
        found = Header(*_HEADER.unpack(data)) if len(data) == _HEADER.size else Header()
        return found if found.magic == _MAGIC else Header()

    def set_header(self, header: Header) -> None:
        """Write the header; `Header()` marks the buffer as empty."""
        os.pwrite(self.fd, _HEADER.pack(*header), 0)


def choose_buffer(buffers: Sequence[AnyMemory], step: int) -> AnyMemory:
    """Return the buffer that a snapshot of this step may overwrite.

    It is one that holds this or a later step, which the run repeats; otherwise the older one, so
    that the newest snapshot stays complete while this one is written.
    """
    held = {one.header().step: one for one in buffers}
    repeated = [one for one in held if one >= step]
    return held[min(repeated or held)]


def whole_steps(held: Sequence[Mapping[int, int]]) -> list[int]:
    """Return the steps for which no rank lacks its part.

    For each rank, `held` maps its steps to the number of ranks that hold a part: all, or 1 if rank
    0 holds everything.
    """
    return [
        step
        for step, holders in held[0].items()
        if holders == 1 or (holders > 1 and all(step in one for one in held))
    ]
