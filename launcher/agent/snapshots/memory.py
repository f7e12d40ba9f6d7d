"""The node agent's memory for its ranks' snapshots (laid out in distributed/checkpoint/memory.py).

Another node keeps a copy of rank 0's newest snapshot, in case node rank 0 is lost. The copy is
sent over the agents' link in small pieces, so that it does not delay other messages.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from distributed.checkpoint.memory import BEGIN, FILES, Memory, whole_steps
from distributed.heartbeat import name_record
from launcher import descriptors, own_time, processes
from launcher.agent.output.stream import say
from launcher.agent.snapshots import save as saving
from launcher.outcome import NodeEnd
from launcher.wire import limits
from launcher.wire.meeting import is_busy
from launcher.wire.messages import HandedOver, Parts, SnapshotData, SnapshotPiece
from launcher.wire.node_link import Link, Peers

PIECE = 1 << 17  # bytes
_AT_ONCE = 1 << 23  # bytes


def _new_file() -> int:
    fd = descriptors.anonymous_file("snapshot")
    os.set_inheritable(fd, True)  # also for programs that a rank executes
    return fd


class Snapshots:
    """The buffers of this node: for each rank, two for its own parts and two for copied parts.

    `_copies` holds the copied parts; `incoming` holds the copy of node rank 0's snapshot.
    """

    def __init__(self, ranks: int) -> None:
        self._own = [Memory(_new_file()) for _ in range(2 * ranks)]
        self._copies = [Memory(_new_file()) for _ in range(2 * ranks)]
        self.outgoing = Outgoing(self._own[:2])
        self.incoming = Incoming()

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return the environment variables that locate a rank's buffers."""
        pair = slice(2 * local_rank, 2 * local_rank + 2)
        buffers = *self._own[pair], *self._copies[pair]
        return {FILES: ",".join(name_record(buffer.fd, 0) for buffer in buffers)}

    def step(self) -> int:
        """Return the step of the newest complete snapshot, or -1 if there is none."""
        return max(_whole_steps(self._own), default=-1)

    def parts(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Return which ranks' parts of sharded snapshots are here, by step: own and copied ones."""
        return _holders_of_parts(self._own), _holders_of_parts(self._copies)

    def find_parts(self, others: Iterable[NodeEnd], saved_step: int) -> Parts | None:
        """Return the newest complete snapshot whose parts are on several nodes.

        `others` are the other nodes' reports; a lost part counts if another node has a copy.
        Returns None if there is no such snapshot, or if a checkpoint is as new.
        """
        own, copies = self.parts()
        nodes = [NodeEnd(parts=own, copies=copies), *others]
        headers = [buffer.header() for buffer in (*self._own, *self._copies)]
        holders = {one.step: one.holders for one in headers if _is_shared(one.holders, self._own)}

        for step in sorted(holders, reverse=True):
            held = {rank for node in nodes for rank in node.parts.get(str(step), ())}
            copied = {rank for node in nodes for rank in node.copies.get(str(step), ())}
            ranks = {*range(holders[step])}
            is_newer = step > max(0, saved_step)  # step 0 is the start
            if is_newer and ranks <= held | copied:
                folder = f"step-{step}.tmp-{os.urandom(8).hex()}"  # for this save alone
                return Parts(step, folder, sorted(ranks - held))
        return None

    def hand_over(self, first_node: Link, parts: Parts | None, limit_s: float) -> None:
        """On a node other than node rank 0, hand over its parts, if any, to node rank 0.

        Then wait up to `limit_s` until node rank 0's agent has exited, because launchers give the
        other nodes little time once one node has finished.
        """
        deadline = own_time.now() + limit_s
        processes.die_with_parent(os.getppid())  # the event loop no longer watches the supervisor
        if parts is not None:
            write = partial(saving.hand_over, self._files(parts), parts.folder)
            _save_in_child(write, parts.step, deadline)
            first_node.send(HandedOver())
        while first_node.wait(deadline) is not None:
            pass  # such as a heartbeat

    def save_parts(self, parts: Parts, attempt: int, peers: Peers, limit_s: float) -> int:
        """On node rank 0, save a snapshot with the parts that other nodes hand over.

        Takes up to `limit_s`, half of it to wait for the parts. Returns the step, or -1 if that
        failed. `attempt` is the run's, with which this process locks the checkpoint folder.
        """
        deadline = own_time.now() + limit_s
        for peer in peers.values():
            while not isinstance(peer.wait(deadline - limit_s / 2), HandedOver | None):
                pass  # such as a heartbeat
        write = partial(saving.save, self._files(parts), attempt, parts.folder)
        is_saved = _save_in_child(write, parts.step, deadline)
        return parts.step if is_saved else -1

    def save(
        self,
        saved_step: int,  # of the last checkpoint
        attempt: int,  # of the run, with which this process locks the checkpoint folder
        *,
        is_first_node: bool,
        limit_s: float,
    ) -> int:
        """Save the newest snapshot as a checkpoint, if it is newer than the last checkpoint.

        If that fails, save the one before. A node other than node rank 0 saves its copy of node
        rank 0's. Step 0 is the start of the run, and needs no checkpoint. Of a sharded snapshot,
        other nodes hold parts, which this node cannot get here: nothing is saved, with a warning.
        Takes up to `limit_s`. Returns the step, or -1 if nothing was saved.
        """
        deadline = own_time.now() + limit_s
        buffers = self._own if is_first_node else self.incoming.buffers
        newer = [step for step in _whole_steps(buffers) if step > max(0, saved_step)]
        if newer and _is_shared(max(buffer.header().holders for buffer in buffers), buffers):
            say("warning: the snapshot in memory was not saved: parts of it are lost")
            return -1

        for step in sorted(newer, reverse=True):
            files = [buffer.fd for buffer in buffers if buffer.header().step == step]
            write = partial(saving.save, files, attempt)
            if own_time.now() < deadline and _save_in_child(write, step, deadline):
                return step
        return -1

    def _files(self, parts: Parts) -> list[int]:
        """Return this node's files of a snapshot: its own parts, and copies of lost parts."""
        own = [buffer for buffer in self._own if buffer.header().rank not in parts.lost]
        copies = [buffer for buffer in self._copies if buffer.header().rank in parts.lost]
        return [buffer.fd for buffer in (*own, *copies) if buffer.header().step == parts.step]


def _is_shared(holders: int, buffers: Sequence[Memory]) -> bool:
    """Whether a snapshot's parts are held by more ranks than these buffers belong to, two each."""
    return 2 * holders > len(buffers)


def _holders_of_parts(buffers: Sequence[Memory]) -> dict[str, list[int]]:
    """Return the ranks whose parts of sharded snapshots these buffers hold, by step."""
    found = dict[str, list[int]]()
    for header in (buffer.header() for buffer in buffers):
        if header.holders > 1:
            found.setdefault(str(header.step), []).append(header.rank)
    return found


def _whole_steps(buffers: Sequence[Memory]) -> list[int]:
    """Return the steps for which every rank has its part; each rank has two buffers."""
    held = [{each.step: each.holders} for each in (buffer.header() for buffer in buffers)]
    pairs = zip(held[::2], held[1::2], strict=True)
    return whole_steps([first | second for first, second in pairs])


def _save_in_child(write: Callable[[], int], step: int, deadline: float) -> bool:
    """Save a snapshot in a child process, because the disk may hang. Returns whether it succeeded.

    `write` returns an exit code. Waits until `deadline` (own_time), then warns and kills the child.
    From now on, this process dies with the supervisor.
    """
    agent = os.getpid()
    processes.die_with_parent(os.getppid())  # the event loop no longer watches the supervisor
    if (pid := os.fork()) == 0:
        processes.die_with_parent(agent)
        try:
            os._exit(write())
        finally:
            os._exit(1)

    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if own_time.now() > deadline:
            processes.send([pid], signal.SIGKILL)
            say(f"warning: the snapshot of step {step} in memory was not saved in time")
            return False
        time.sleep(limits.POLL_S)
    return ended[1] == 0


# --- a copy on another node ---------------------------------------------------------------------


class Outgoing:
    """Sends the newest snapshot in the given buffers to another node, in small pieces."""

    def __init__(self, buffers: Sequence[Memory]) -> None:
        """Send nothing until `begin` is called."""
        self._buffers = buffers
        self._image = descriptors.anonymous_file("snapshot")
        self.rest_s = 0.0  # until the next piece
        self.next_at = math.inf

    def begin(self) -> None:
        """Start sending: this is node rank 0 of several nodes, and another node keeps a copy.

        In a new attempt, that may be another node, which has nothing yet: start from the beginning.
        """
        self._pieces = self.pieces()
        self.next_at = own_time.now()

    def on_time(self, peers: Peers) -> None:
        """Send the next piece to the lowest other node rank, if it is due and can be received."""
        now = own_time.now()
        if now < self.next_at:
            return

        self.next_at = now + limits.SNAPSHOT_PIECE_S  # unless the piece sets another pause
        if not peers:
            return
        peer = peers[min(peers)]
        if not is_busy(peer.socket):
            if piece := next(self._pieces):
                peer.send(piece)
            self.next_at = now + self.rest_s

    def pieces(self) -> Iterator[SnapshotData | None]:
        """Yield the pieces of each new snapshot, header last, or None while none is ready; endless.

        Before each yield, sets `rest_s`, the pause until the next one. The pieces come from a
        private copy, which the rank cannot overwrite. While it is made, also yields None, because
        that must not hold up the event loop.
        """
        sent_step = -1
        while True:
            newest = max(self._buffers, key=lambda buffer: buffer.header().step)
            header = newest.header()
            is_incomplete = header.checksum < 0  # or there is none
            is_sharded = header.holders > 1  # the ranks then copy it themselves
            if is_incomplete or is_sharded or header.step <= sent_step:
                self.rest_s = limits.SNAPSHOT_LOOK_S
                yield None
                continue

            self.rest_s = limits.SNAPSHOT_PIECE_S
            for start in range(0, header.size, _AT_ONCE):
                os.pwrite(self._image, os.pread(newest.fd, _AT_ONCE, start), start)
                yield None
            if newest.header() != header:  # its rank has begun to overwrite it
                continue

            for start in (*range(BEGIN, header.size, PIECE), 0):
                size = min(PIECE, header.size - start) if start else BEGIN
                data = os.pread(self._image, size, start)
                yield SnapshotData(SnapshotPiece(header.step, start, len(data)), data)
            sent_step = header.step


class Incoming:
    """Another node's snapshot: the newest complete one, and the one that is still arriving."""

    def __init__(self) -> None:
        self.buffers = [Memory(descriptors.anonymous_file("snapshot")) for _ in range(2)]
        self._next: Memory | None = None

    def store_piece(self, arrived: SnapshotData) -> None:
        """Store a piece. The first replaces the older snapshot; the last, the header, ends it."""
        offset = arrived.piece.offset
        if offset == BEGIN:  # the first piece
            self._next = min(self.buffers, key=lambda buffer: buffer.header().step)
            os.ftruncate(self._next.fd, 0)  # without a header, it counts as empty
        if self._next is not None:  # otherwise this agent missed the snapshot's beginning
            os.pwrite(self._next.fd, arrived.data, offset)
