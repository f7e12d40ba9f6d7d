"""The node agent's memory for its ranks' snapshots: distributed/snapshot.py lays it out."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from distributed import checkpoint_files as files
from distributed.errors import Refused
from distributed.heartbeat import name_record
from distributed.lock import RunLock
from distributed.snapshot import FILES, Buffer, Snapshot, merge, newest_whole
from launcher import processes
from launcher.agent.output import say
from launcher.agent.snapshot_copy import Incoming, Outgoing
from launcher.text import count

_POLL_S = 0.01


def _new_file() -> int:
    fd = processes.anonymous_file("snapshot")
    os.set_inheritable(fd, True)  # also by what a rank executes
    return fd


class Snapshots:
    """Two buffers for each rank of this node, and the copy of another node's snapshot."""

    def __init__(self, ranks: int, *, has_others: bool = False) -> None:
        """`has_others`: this is the first of several nodes, and another keeps a copy."""
        self._buffers = [[Buffer(_new_file()) for _ in range(2)] for _ in range(ranks)]
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
            os._exit(_write(buffers, step))
        deadline = time.monotonic() + limit_s
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                processes.send([pid], signal.SIGKILL)
                say(f"warning: step {step}, in memory, was not saved within {limit_s:g} s")
                return -1
            time.sleep(_POLL_S)
        return step if ended[1] == 0 else -1


def _newest(buffers: Sequence[Sequence[Buffer]]) -> int:
    headers = [[one.header() for one in of_rank] for of_rank in buffers]
    return newest_whole([{one.step: one.holders for one in each} for each in headers])


def _write(buffers: Sequence[Sequence[Buffer]], step: int) -> int:
    """Write a snapshot of which the parts are here; returns an exit code."""
    read = [one.read() for of_rank in buffers for one in of_rank if one.header().step == step]
    parts = [one for one in read if one is not None]
    try:
        if parts and len(parts) == len(read) == parts[0].holders:
            return _commit(merge(parts))
        why = f"{count(len(parts), 'rank')} of {parts[0].holders} here" if parts else "damaged"
    except (OSError, RuntimeError, Refused) as error:
        why = str(error)
    say(f"warning: step {step}, in memory, was not saved: {why}")
    return 1


def _commit(taken: Snapshot) -> int:
    folder = Path(taken.folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder, f"run {folder.name}")
    if taken.step <= max(map(files.step_of, files.steps(folder)), default=0):
        return 1
    temporary = folder / f"step-{taken.step}.tmp-{socket.gethostname()}-{os.getpid()}"
    temporary.mkdir()
    tensors = {**taken.fetch(taken.trees), "ranks": taken.ranks}
    files.write(temporary, tensors, taken.progress, {})
    with lock.committing():
        files.commit(temporary, folder / f"step-{taken.step}")
        files.prune(folder, taken.step, taken.keep_last)
    say(f"step {taken.step} was in memory, and is saved now, in {folder}")
    return 0
