"""Show the stacks of all ranks on SIGQUIT, or when a script makes no progress (no torch).

Each agent has its ranks write their stacks and sends them to node rank 0's agent, which shows them.
The file ASKED in the run's folder also requests them, and everything shown is appended to SHOWN
there. The files NOTICED pass on SLURM's notices of a time limit.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distributed.environment import printable
from launcher.agent.diagnosis import stuck
from launcher.agent.diagnosis.collectives import find_mismatches
from launcher.agent.node_ranks import NodeRanks
from launcher.own_time import Deadline
from launcher.record.run_json import ASKED, NOTICED, SHOWN
from launcher.text import name_groups, open_own
from launcher.wire import limits
from launcher.wire.messages import NodeStacks, RankStack, StackRequest
from launcher.wire.node_link import Link
from launcher.wire.states import RankState

LONGEST = 2000  # characters shown per line


@dataclass
class Query:
    """The requests for all stacks in one attempt, one request at a time."""

    ranks: NodeRanks
    hosts: Sequence[str]  # by node rank
    show: Callable[[str], None]
    folder: Path | None  # of the run, if it has one
    _look: Deadline = field(default_factory=Deadline)  # when to check for the files, on node rank 0
    _start: Deadline = field(default_factory=Deadline)
    _end: Deadline = field(default_factory=Deadline)  # when to stop waiting for other nodes
    _told: dict[int, NodeStacks] = field(default_factory=dict)  # the answers, by node rank
    _silent: RankState | None = None  # the silent rank that the request is about
    _known: Sequence[int] = ()  # the progress at the last reported silence

    def __post_init__(self) -> None:
        if self.folder and self.ranks.node_rank == 0:
            self._look.set_within(limits.ASKED_LOOK_S)

    @property
    def next_at(self) -> float:
        """The time at which on_time() next has something to do."""
        return min(self._look.at, self._start.at, self._end.at)

    def ask(self) -> None:
        """Schedule a request for all stacks; a signal handler may call this."""
        self._start.set_within(0.0)

    def ask_about(self, suspect: RankState) -> None:
        """Report a silent rank, or end the run because of it, once per silence."""
        if self._known != suspect.progress:
            self._silent = suspect
            self._known = suspect.progress
            self.ask()

    def receive(
        self, node: int, message: StackRequest | NodeStacks, peers: Mapping[int, Link]
    ) -> None:
        """Keep an answer, or answer a request, which blocks while the ranks here write it.

        On node rank 0, a request from another node makes it ask all nodes.
        """
        if isinstance(message, NodeStacks):
            self._add_answer(node, message, peers)
        elif self.ranks.node_rank == 0:
            self.ask()
        else:
            for peer in peers.values():  # only node rank 0
                peer.send(self._collect_here())

    def on_time(self, peers: Mapping[int, Link]) -> int | None:
        """Do what is due: look for the files, send a request, or end one.

        Deletes the files that it finds: ASKED starts a request; one of NOTICED raises its signal in
        this process. Node rank 0 sends a request to all nodes, and blocks while the ranks here
        answer it; another node sends it to node rank 0. Returns the rank that holds up the run if
        the run must end because of it, otherwise None.
        """
        if self._look.expire():
            self._look.set_within(limits.ASKED_LOOK_S)
            assert self.folder is not None
            for signum, name in {0: ASKED, **NOTICED}.items():
                with contextlib.suppress(OSError):  # no file means no request
                    (self.folder / name).unlink()
                    signal.raise_signal(signum) if signum else self.ask()

        if self._start.expire() and not self._told:  # otherwise a request is in progress
            for peer in peers.values():
                peer.send(StackRequest())
            if self.ranks.node_rank == 0:
                self._end.set_within(limits.for_nodes(limits.STACKS_ANSWER_S, len(peers)))
                self._add_answer(0, self._collect_here(), peers)
        return self._conclude(peers) if self._end.expire() else None

    def _collect_here(self) -> NodeStacks:
        """Return this node's answer. Blocks while the ranks here write it."""
        stacks = self.ranks.collect_stacks()
        calls = self.ranks.collect_calls()
        return NodeStacks([RankStack(rank, at, calls.get(rank)) for rank, at in stacks.items()])

    def _add_answer(self, node: int, told: NodeStacks, peers: Mapping[int, Link]) -> None:
        """Keep a node's answer, unless it is late; stop waiting once all nodes have answered."""
        if node == 0 or self._told:  # otherwise the request has ended
            self._told[node] = told
        if 0 in self._told and self._told.keys() >= peers.keys():
            self._end.set_within(0.0)

    def _conclude(self, peers: Collection[int]) -> int | None:
        """End the request: show the answers and return None, or return the rank that is stuck.

        It returns a rank only if the run must end because of it; then nothing is shown, because the
        failure will have the stacks. What is shown is also appended to SHOWN. `peers` are the other
        nodes.
        """
        everyone = [rank for node in self._told.values() for rank in node.ranks]
        places = {each.rank: each.frames for each in everyone}
        calls = {each.rank: each.calls for each in everyone if each.calls}
        unheard = [self.hosts[node] for node in peers if node not in self._told]
        silent = self._silent
        self._silent = None
        self._told.clear()

        head = "where the ranks are, innermost call first:"
        if silent is not None:
            odd = stuck.find_odd(silent, places)
            if silent.ends_run:
                return silent.rank if odd is None else odd
            step = silent.progress[0]
            when = "since the ranks started"
            if step >= 0:
                when = f"more than 10 times the longest gap between steps, after step {step}"
            who = "all ranks are at the same point" if odd is None else f"rank {odd} is behind"
            # The parent is the supervisor, which forwards the signal.
            again = f"kill -QUIT {os.getppid()} repeats this; HANG_SECONDS=N ends a hung run"
            head = f"no step for {silent.silence_s:.0f} s, {when}: {who}; {again}; {head}"

        lines = [
            head,
            *name_groups(stuck.group_stacks(places)),
            *(f"{host}: no answer" for host in unheard),
        ]
        lines += find_mismatches(calls)
        text = "\n  ".join(printable(line, LONGEST) for line in lines)
        self.show(text)

        if self.folder:
            with contextlib.suppress(OSError), open_own(self.folder / SHOWN, "a") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        return None
