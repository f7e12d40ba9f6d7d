"""The node agent's side of the heartbeats: the shared memory that its ranks write to (no torch)."""

from __future__ import annotations

import os

from distributed.heartbeat import RECORD, Beat


class Heartbeats:
    """The agent's side: one record for each rank of the node, by local rank."""

    def __init__(self, ranks: int) -> None:
        self._fd = os.memfd_create("heartbeat", 0)  # inherited, also by what a rank executes
        os.write(self._fd, RECORD.pack(*Beat()) * ranks)
        self.ranks = ranks
        self.path = f"/proc/self/fd/{self._fd}"  # for the ranks

    def read(self, local_rank: int) -> Beat:
        """Return a rank's newest beat."""
        return Beat(*RECORD.unpack(os.pread(self._fd, RECORD.size, RECORD.size * local_rank)))

    def furthest(self) -> tuple[int, int]:
        """Return the newest checkpoint, and the most steps done by any rank; -1: none."""
        beats = [self.read(local_rank) for local_rank in range(self.ranks)]
        return max(beat.saved for beat in beats), max(beat.step for beat in beats)

    def close(self) -> None:
        os.close(self._fd)
