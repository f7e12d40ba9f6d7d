"""The agents of a run as node rank 0 knows them: who has ranks, and who waits (no torch)."""

from __future__ import annotations

import dataclasses
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from launcher.agent.assignment import Assignment, Seat
from launcher.agent.nodes.protocol import NodeBeat, Peer
from launcher.agent.verdict import Verdict
from launcher.failure import Failure
from launcher.text import count


@dataclass
class Team:
    """Who sits where. `peers` and `spares` lose those whose connection has ended."""

    run_id: str
    seats: list[Seat]  # by node rank; the first is this agent's
    peers: dict[int, Peer]  # of the others, by node rank
    waiting: Mapping[int, Seat] = field(default_factory=dict)  # spares that have come, by place
    spares: dict[int, Peer] = field(default_factory=dict)  # those that are still there, by place
    min_nodes: int = 0  # with which the run goes on without a spare; 0: it replaces no node

    def __post_init__(self) -> None:
        self.counted = len(self.seats) + len(self.spares)  # agents, at the last start of the ranks

    @property
    def lost(self) -> list[int]:
        """The node ranks whose agents are gone."""
        return [rank for rank in range(1, len(self.seats)) if rank not in self.peers]

    @property
    def is_majority(self) -> bool:
        """Whether the others that are left, with node rank 0, are at least half of all."""
        return 2 * (1 + len(self.peers) + len(self.spares)) >= self.counted

    def why_not(self, *, are_all_quiet: bool = True) -> str:
        """Return why the run cannot go on without the nodes that are lost; nothing where it can.

        Those that are left have ended their ranks, unless not `are_all_quiet`.
        """
        if not self.min_nodes and (self.lost or not are_all_quiet):
            return "a node's agent is gone: there is no restart"
        if not self.lost:
            return ""
        if not self.is_majority:  # the others may go on, and then they are the run
            there = len(self.peers) + len(self.spares)
            return f"this node reaches {there} of {self.counted - 1} others: it ends"
        left = len(self.seats) - len(self.lost) + len({*self._find_spares()})
        if left < self.min_nodes:
            hosts = ", ".join(self.seats[rank].host for rank in self.lost)
            return f"no spare is left for {hosts}: there is no restart"
        return ""

    def refill(self) -> list[str]:
        """Let spares take the places of lost nodes, or close up; returns who took over."""
        told = []
        for rank, spare in {**dict(self._find_spares())}.items():
            told.append(f"{spare.host} takes {self.seats[rank].host}'s place")
            self.seats[rank] = spare
            self.peers[rank] = self.spares.pop(spare.place)
        if gaps := self.lost:
            hosts = ", ".join(self.seats[rank].host for rank in gaps)
            kept = [rank for rank in range(len(self.seats)) if rank not in gaps]
            peers = {new: self.peers[old] for new, old in enumerate(kept) if old}
            self.peers.clear()
            self.peers.update(peers)
            self.seats[:] = [self.seats[rank] for rank in kept]
            told.append(f"{count(len(kept), 'node')} without {hosts}")
        self.counted = len(self.seats) + len(self.spares)
        return told

    def _find_spares(self) -> Iterator[tuple[int, Seat]]:
        """Yield lost node ranks, each with a spare that runs as many ranks."""
        free = [self.waiting[place] for place in self.spares]
        for rank in self.lost:
            spare = next((one for one in free if one.nproc == self.seats[rank].nproc), None)
            if spare is not None:
                free.remove(spare)
                yield rank, spare

    def assign(self, attempt: int = 0, address: str = "", port: int = 0) -> dict[int, Assignment]:
        """Return every agent's part, by place: ranks follow node ranks."""
        counts = [seat.nproc for seat in self.seats]
        common = Assignment(
            self.run_id,
            first_rank=0,
            world_size=sum(counts),
            hosts=[seat.host for seat in self.seats],
            attempt=attempt,
            address=address,
            port=port,
            seats=self.seats if self.min_nodes else (),
            spares=[self.waiting[place] for place in self.spares],
        )
        parts = dict.fromkeys(self.spares, common)
        for rank, seat in enumerate(self.seats):
            first = sum(counts[:rank])
            parts[seat.place] = dataclasses.replace(common, node_rank=rank, first_rank=first)
        return parts

    def tell(self, parts: Mapping[int, Assignment], verdict: Verdict | None = None) -> None:
        """Tell every other agent its part; with a verdict, how the attempt ended, too."""
        seats = {self.seats[rank].place: peer for rank, peer in self.peers.items()}
        for place, peer in {**seats, **self.spares}.items():
            part = parts.get(place)
            if verdict is not None:
                peer.send(dataclasses.replace(verdict, next=part))
            elif part is not None:
                peer.send(part)

    # --- spares during an attempt: it goes on without one that is gone --------------------------

    def listen(self, selector: selectors.BaseSelector, on_lost: Callable[[Failure], None]) -> None:
        """Notice spares that are gone, and tell of each."""
        self._selector, self._on_lost = selector, on_lost
        for place, peer in self.spares.items():
            peer.heard = time.monotonic()
            selector.register(peer.socket, selectors.EVENT_READ, partial(self._read, place))

    def beat(self) -> None:
        """Tell the spares that node rank 0 lives, and see whether they do."""
        for place, peer in list(self.spares.items()):
            peer.send(NodeBeat(None))
            if peer.is_silent:
                self._drop(place)

    def _read(self, place: int) -> None:
        if self.spares[place].receive() is None:
            self._drop(place)

    def _drop(self, place: int) -> None:
        peer = self.spares.pop(place)
        self._selector.unregister(peer.socket)
        peer.close()
        if not peer.is_silent:  # else it may be there for others
            self.counted -= 1
        self._on_lost(peer.loss(place, self.waiting[place].host))
