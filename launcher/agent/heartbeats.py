"""The node agent's side of the heartbeats: the shared memory that its ranks write to (no torch)."""

from __future__ import annotations

import os

from distributed.heartbeat import RECORD, Beat, name_record
from launcher import processes


class Heartbeats:
    """The agent's side: one record for each rank of the node, by local rank."""

    def __init__(self, ranks: int) -> None:
        self._fd = processes.anonymous_file("heartbeat")
        os.set_inheritable(self._fd, True)  # also by what a rank executes
        self._ranks = ranks
        self._reached = (-1, -1)
        self.clear()

    def name(self, local_rank: int) -> str:
        """Return what tells a rank where its record is."""
        return name_record(self._fd, local_rank)

    def clear(self) -> None:
        """Begin anew: the ranks that are started next have made no beat."""
        os.pwrite(self._fd, RECORD.pack(*Beat()) * self._ranks, 0)

    def read(self, local_rank: int) -> Beat:
        """Return a rank's newest beat."""
        return Beat(*RECORD.unpack(os.pread(self._fd, RECORD.size, RECORD.size * local_rank)))

    def step(self) -> int:
        """Return the most steps that any rank has done since the last clear(); -1: none has."""
        return max(self.read(local_rank).step for local_rank in range(self._ranks))

    def saved(self) -> int:
        """Return the step of the newest checkpoint that any rank has told; -1: none."""
        return max(self.read(local_rank).saved for local_rank in range(self._ranks))

    def are_counted(self) -> bool:
        """Whether a script that does not beat made the steps."""
        return any(self.read(local_rank).is_counted for local_rank in range(self._ranks))

    def reached(self) -> tuple[int, int]:
        """Return the newest checkpoint, and the most steps done by any rank so far; -1: none."""
        now = self.saved(), self.step()
        self._reached = max(self._reached, now)
        return self._reached
