"""The node agent's memory for its ranks' snapshots: distributed/snapshot.py lays it out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from distributed.heartbeat import name_record
from distributed.snapshot_memory import FILES, Memory, whole_steps
from launcher import processes
from launcher.agent.output import say
from launcher.agent.protocol import Peer
from launcher.agent.snapshot_copy import Incoming, Outgoing

_POLL_S = 0.01


def _new_file() -> int:
    fd = processes.anonymous_file("snapshot")
    os.set_inheritable(fd, True)  # also by what a rank executes
    return fd


class Snapshots:
    """Two buffers for each rank of this node, and two for what it keeps of another node.

    That is a rank's part, which the ranks exchange, or the copy of all that node rank 0 sends.
    """

    def __init__(self, ranks: int) -> None:
        self._buffers = [[Memory(_new_file()) for _ in range(2)] for _ in range(ranks)]
        self._copies = [[Memory(_new_file()) for _ in range(2)] for _ in range(ranks)]
        self.outgoing = Outgoing(self._buffers[0])
        self.incoming = Incoming()

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return what tells a rank where its buffers are."""
        files = [one.fd for one in (*self._buffers[local_rank], *self._copies[local_rank])]
        return {FILES: ",".join(name_record(fd, 0) for fd in files)}

    def step(self) -> int:
        """Return the step of the newest whole snapshot; -1: there is none."""
        return max(_whole_steps(self._buffers), default=-1)

    def await_save(self, first_node: Peer | None, limit_s: float) -> None:
        """On another node, stay until the first one's agent has ended, which may save.

        Launchers give the others little time once one node has ended.
        """
        processes.die_with_parent(os.getppid())  # nobody watches the guardian any more
        if first_node is not None:
            first_node.wait_for_end(time.monotonic() + limit_s)

    def save(self, *, is_first_node: bool, saved_step: int, limit_s: float) -> int:
        """Save the newest snapshot as a checkpoint, if it is newer than what is saved.

        On another node than the first, the copy of it. Returns the step; -1: none was saved.
        """
        buffers = self._buffers if is_first_node else [self.incoming.buffers]
        deadline = time.monotonic() + limit_s
        newer = [step for step in _whole_steps(buffers) if step > max(0, saved_step)]
        holders = max((one.header().holders for of_rank in buffers for one in of_rank), default=0)
        if newer and holders > len(buffers):
            say(
                f"warning: step {max(newer)}, in memory, was not saved: other nodes hold part of it"
            )
            return -1
        for step in sorted(newer, reverse=True):
            if time.monotonic() < deadline and _save(buffers, step, deadline):
                return step
        return -1


def _whole_steps(buffers: Sequence[Sequence[Memory]]) -> list[int]:
    headers = [[one.header() for one in of_rank] for of_rank in buffers]
    return whole_steps([{one.step: one.holders for one in each} for each in headers])


def _save(buffers: Sequence[Sequence[Memory]], step: int, deadline: float) -> bool:
    """Save a snapshot, in a process of its own: a disk may hang. Returns whether it is saved."""
    agent = os.getpid()
    processes.die_with_parent(os.getppid())  # nobody watches the guardian any more
    if (pid := os.fork()) == 0:
        processes.die_with_parent(agent)
        try:
            from launcher.agent import save_snapshot  # which takes a while to import

            os._exit(save_snapshot.save([[one.fd for one in of_rank] for of_rank in buffers], step))
        finally:
            os._exit(1)
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            processes.send([pid], signal.SIGKILL)
            say(f"warning: step {step}, in memory, was not saved in time")
            return False
        time.sleep(_POLL_S)
    return ended[1] == 0
