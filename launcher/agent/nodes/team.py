"""The agents of a run as node rank 0 sees them: which have ranks, which are spares (no torch)."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.failure import Failure
from launcher.text import count
from launcher.wire import limits, messages
from launcher.wire.messages import Assignment, Member, Verdict
from launcher.wire.node_link import Link, Peers


@dataclass
class Team:
    """Which agent has which node rank, and the links to those that are not lost."""

    run_id: str
    members: Sequence[Member]  # by node rank; the first is this agent's
    peers: Peers  # connections to the others, by node rank
    spares: dict[Member, Link]
    min_nodes: int  # the fewest nodes to continue with; 0 means never replace a node

    def __post_init__(self) -> None:
        # The number of agents when the ranks last started.
        self.counted = len(self.members) + len(self.spares)

    @property
    def lost(self) -> list[int]:
        """The node ranks whose agents are gone."""
        return [rank for rank in range(1, len(self.members)) if rank not in self.peers]

    @property
    def is_majority(self) -> bool:
        """Whether node rank 0 and the remaining agents are at least half of all agents.

        A successor needs more than half, so that only one of them continues the run.
        """
        return 2 * (1 + len(self.peers) + len(self.spares)) >= self.counted

    def why_stop(self, *, are_all_quiet: bool = True) -> str:
        """Return why the run cannot continue without the lost nodes; empty if it can.

        `are_all_quiet` means that the ranks of all remaining nodes have exited. If not, the nodes
        of ranks that still run count as lost; the run continues only if it may replace nodes.
        """
        if not self.min_nodes and (self.lost or not are_all_quiet):
            return "not restarting: a node's agent is gone"
        if not self.lost:
            return ""

        if not self.is_majority:  # the others may continue the run without this node
            there = len(self.peers) + len(self.spares)
            return f"stopping: this node reaches only {there} of {self.counted - 1} other agents"
        if len(self.members) - len(self.lost) + len({*self._find_spares()}) < self.min_nodes:
            hosts = ", ".join(self.members[rank].host for rank in self.lost)
            return f"not restarting: no spare is left for {hosts}"
        return ""

    def part_with(self, nodes: Collection[int]) -> None:
        """Close the links to nodes that are lost, or whose ranks do not exit."""
        for node_rank in nodes:
            self.peers[node_rank].close()
        self.peers = {rank: peer for rank, peer in self.peers.items() if rank not in nodes}

    def refill(self) -> list[str]:
        """Replace lost nodes with spares, or drop them, so that the other node ranks move up.

        Changes `members`, `peers` and `spares`. Returns a line per change, for the user.
        """
        took_over = []
        members = [*self.members]
        peers = {**self.peers}
        for rank, spare in self._find_spares():
            took_over.append(f"{spare.host} replaces {members[rank].host}")
            members[rank] = spare
            peers[rank] = self.spares.pop(spare)

        kept = [rank for rank in range(len(members)) if rank in (0, *peers)]  # 0 is this agent
        if gaps := [member.host for rank, member in enumerate(members) if rank not in kept]:
            hosts = ", ".join(gaps)
            took_over.append(f"continuing on {count(len(kept), 'node')}, without {hosts}")

        self.members = [members[rank] for rank in kept]
        self.peers = {new: peers[old] for new, old in enumerate(kept) if old}
        self.counted = len(self.members) + len(self.spares)
        return took_over

    def _find_spares(self) -> Iterator[tuple[int, Member]]:
        """Yield lost node ranks, each with a spare that can run the same number of ranks."""
        free = [*self.spares]
        for rank in self.lost:
            nproc = self.members[rank].nproc
            spare = next((member for member in free if member.nproc == nproc), None)
            if spare is not None:
                free.remove(spare)
                yield rank, spare

    def assign(self, attempt: int = 0, address: str = "", port: int = 0) -> dict[int, Assignment]:
        """Return every agent's assignment, by node id. Ranks are numbered in node rank order.

        `address` and `port` are those of torch's store; empty and 0 mean as in the arguments.
        """
        common = Assignment(
            self.run_id,
            first_rank=0,
            world_size=sum(member.nproc for member in self.members),
            hosts=[member.host for member in self.members],
            attempt=attempt,
            address=address,
            port=port,
            members=self.members if self.min_nodes else (),
            spares=[*self.spares],
        )

        assignments = {spare.node_id: common for spare in self.spares}
        first_rank = 0
        for node_rank, member in enumerate(self.members):
            own = dataclasses.replace(common, node_rank=node_rank, first_rank=first_rank)
            assignments[member.node_id] = own
            first_rank += member.nproc
        return assignments

    def send_assignments(
        self, assignments: Mapping[int, Assignment], verdict: Verdict | None = None
    ) -> None:
        """Send every other agent its assignment and, if given, the verdict on the attempt.

        The verdict is also sent to agents without an assignment: for them, no attempt follows.
        """
        others = [(self.members[rank], peer) for rank, peer in self.peers.items()]
        last = messages.write(verdict) if verdict else ""  # written once: it may name every rank
        for member, peer in (*others, *self.spares.items()):
            own = assignments.get(member.node_id)
            following = own if verdict is None else dataclasses.replace(verdict, next=own)
            peer.send(following if own else last)

    # --- spares during an attempt, which continues if one is lost -------------------------------

    def check_spares(self, on_lost: Callable[[Failure], None]) -> None:
        """Receive the spares' heartbeats. Remove spares that are lost, and report each one."""
        for spare, peer in list(self.spares.items()):
            is_gone = peer.receive(limits.POLL_S) is None
            if is_gone or peer.is_silent:
                del self.spares[spare]
                self.counted -= is_gone  # others may still reach a silent spare
                on_lost(peer.loss(spare.node_id, spare.host))
                peer.close()
