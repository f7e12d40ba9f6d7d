"""Nodes that exist only as connections to a real agent of node rank 0.

They introduce themselves with the product's handshake and speak its messages, so everything that
node rank 0 does is real: only the number of the other machines is simulated.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from launcher import handshake
from launcher.agent.join import versions
from launcher.failure import Failure
from launcher.outcome import NodeEnd
from launcher.preflight import must_match
from launcher.wire import limits, messages
from launcher.wire.messages import (
    Assignment,
    EndRanks,
    NodeBeat,
    NodeReport,
    NodeStacks,
    PairResult,
    PairTest,
    RankStack,
    StackRequest,
    StopRequest,
    Verdict,
)
from launcher.wire.states import RankState

NPROC = 8  # ranks of each simulated node; the real one has a single rank
STACK = ("train.py:9 in step", "train.py:31 in main")
_CONNECT_S = 60.0


@dataclass
class Nodes:
    """All nodes but the first. A thread answers for them from `join` on."""

    port: int
    secret: str
    number: int  # of nodes, with the first
    script: Path
    received: Counter[str] = field(default_factory=Counter)  # messages, by kind
    judged: set[int] = field(default_factory=set)  # node ranks that have the verdict
    _links: dict[int, socket.socket] = field(default_factory=dict)  # by node rank
    _ranks: dict[int, int] = field(default_factory=dict)  # node ranks, by descriptor
    _over: threading.Event = field(default_factory=threading.Event)

    def join(self) -> None:
        """Connect all nodes at once, and answer node rank 0 from now on."""
        files = must_match.hash_files([str(self.script)], Path())
        files = {"the list of arguments": "", **files}
        report = NodeReport(1, self.number, NPROC, "", "", versions(), files)
        with ThreadPoolExecutor(64) as pool:
            list(pool.map(partial(self._connect, report), range(1, self.number)))
        for act in (self._listen, self._beat):
            threading.Thread(target=act, daemon=True).start()

    def _connect(self, report: NodeReport, node: int) -> None:
        link = handshake.connect("127.0.0.1", self.port, self.secret.encode(), _CONNECT_S)
        self._links[node], self._ranks[link.fileno()] = link, node
        self.send(node, replace(report, node_rank=node, host=f"node{node}"))

    def send(self, node: int, *said: object) -> None:
        with contextlib.suppress(OSError):  # node rank 0 has ended
            self._links[node].sendall("".join(f"{messages.write(one)}\n" for one in said).encode())

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node; the first node has only rank 0."""
        first = 1 + (node - 1) * NPROC
        return range(first, first + NPROC)

    def fail(self, node: int, rank: int, stacks: Mapping[str, list[int]] | None = None) -> None:
        """Report that a rank has failed, as a consequence unless it is the node's first one."""
        told = Failure("rank-error", "bad", 7, f"node{node}", node, time.time(), rank, 0)
        self.send(node, told if stacks is None else Failure(**{**vars(told), "stacks": stacks}))

    def be_stuck(self, node: int) -> None:
        """Report that the first rank of a node makes no progress, and holds up all others."""
        for other in self._links:
            rank = self.ranks_of(other)[0]
            progress = (3, 0) if other == node else (4, 0)
            self.send(other, NodeBeat(RankState(rank, progress, other == node, False, 700.0)))

    def close(self, *nodes: int) -> None:
        """End these nodes' agents, or all of them."""
        if not nodes:
            self._over.set()
        for node in nodes or [*self._links]:
            with contextlib.suppress(OSError):
                self._links[node].shutdown(socket.SHUT_RDWR)

    # --- what the agents of these nodes do ----------------------------------------------------

    def _beat(self) -> None:
        while not self._over.wait(limits.BEAT_S):
            for node in self._links:
                self.send(node, NodeBeat(None))

    def _listen(self) -> None:
        poll, buffers = select.poll(), dict.fromkeys(self._ranks, b"")
        for fd in self._ranks:
            poll.register(fd, select.POLLIN)
        while buffers and not self._over.is_set():
            for fd, _ in poll.poll(500):
                node = self._ranks[fd]
                data = b""
                with contextlib.suppress(OSError):
                    data = self._links[node].recv(1 << 16)
                if not data:
                    poll.unregister(fd)
                    del buffers[fd]
                    continue
                *lines, buffers[fd] = (buffers[fd] + data).split(b"\n")
                for line in lines:
                    self._answer(node, messages.read(line))

    def _answer(self, node: int, message: object) -> None:
        self.received[type(message).__name__] += 1
        ranks = self.ranks_of(node)
        match message:
            case PairTest():
                self.send(node, PairResult([]))
            case EndRanks() if message.stuck >= 0:
                self.fail(node, ranks[0], {" < ".join(STACK): [*ranks]})
                self.send(node, NodeEnd([*ranks], ranks[0], [137] * NPROC))
            case EndRanks():
                self.send(node, NodeEnd([*ranks], ranks[0], [143] * NPROC))
            case StopRequest():
                self.send(node, NodeEnd([], ranks[0], [75] * NPROC, 40))
            case StackRequest():
                self.send(node, NodeStacks([RankStack(rank, STACK) for rank in ranks]))
            case Verdict():
                self.judged.add(node)


def is_assigned(nodes: Nodes) -> bool:
    return nodes.received[Assignment.__name__] == nodes.number - 1
