"""The node agent's memory for its ranks' snapshots: distributed/snapshot.py lays it out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from distributed.heartbeat import name_record
from distributed.snapshot_memory import FILES, Memory, newest_whole
from launcher import processes
from launcher.agent.output import say
from launcher.agent.snapshot_copy import Incoming, Outgoing

_POLL_S = 0.01


def _new_file() -> int:
    fd = processes.anonymous_file("snapshot")
    os.set_inheritable(fd, True)  # also by what a rank executes
    return fd


class Snapshots:
    """Two buffers for each rank of this node, and the copy of another node's snapshot."""

    def __init__(self, ranks: int, *, has_others: bool = False) -> None:
        """`has_others`: this is the first of several nodes, and another keeps a copy."""
        self._buffers = [[Memory(_new_file()) for _ in range(2)] for _ in range(ranks)]
        self.outgoing = Outgoing(self._buffers[0], has_others=has_others)
        self.incoming = Incoming()

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return what tells a rank where its buffers are."""
        return {FILES: ",".join(name_record(one.fd, 0) for one in self._buffers[local_rank])}

    def step(self) -> int:
        """Return the step of the newest whole snapshot; -1: there is none."""
        return _newest(self._buffers)

    def write(self, *, is_first_node: bool, saved_step: int, limit_s: float) -> int:
        """Write the newest snapshot as a checkpoint, if it is newer than what is saved.

        On another node than the first, the copy of it. It takes at most `limit_s`, in a process of
        its own: a disk may hang. Returns the step that was written; -1: none was.
        """
        buffers = self._buffers if is_first_node else [self.incoming.buffers]
        step = _newest(buffers)
        if step <= max(0, saved_step):
            return -1
        if (pid := os.fork()) == 0:
            from launcher.agent import save_snapshot  # which takes a while to import

            os._exit(save_snapshot.save([[one.fd for one in of_rank] for of_rank in buffers], step))
        deadline = time.monotonic() + limit_s
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                processes.send([pid], signal.SIGKILL)
                say(f"warning: step {step}, in memory, was not saved within {limit_s:g} s")
                return -1
            time.sleep(_POLL_S)
        return step if ended[1] == 0 else -1


def _newest(buffers: Sequence[Sequence[Memory]]) -> int:
    headers = [[one.header() for one in of_rank] for of_rank in buffers]
    return newest_whole([{one.step: one.holders for one in each} for each in headers])
