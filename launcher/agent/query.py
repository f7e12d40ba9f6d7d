"""Show the stacks of all ranks on SIGQUIT, or when a script makes no progress (no torch).

Each agent has its ranks write their stacks and sends them to node rank 0's agent, which shows them.
The file ASKED in the run's folder also requests them, and everything shown is appended to SHOWN
there.
"""

import contextlib
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.environment import printable
from launcher.agent.diagnosis import stuck
from launcher.agent.diagnosis.collectives import find_mismatches
from launcher.agent.node_ranks import NodeRanks
from launcher.own_time import Deadline
from launcher.record.run_json import ASKED, SHOWN
from launcher.text import Say, name_groups, open_own
from launcher.wire import limits
from launcher.wire.messages import NodeStacks, RankStack, StackRequest
from launcher.wire.node_link import Peers
from launcher.wire.states import RankState

LONGEST = 2000  # characters shown per line


@dataclass
class Query:
    """The requests for all stacks in one attempt, one request at a time."""

    ranks: NodeRanks
    hosts: Sequence[str]  # by node rank
    show: Say
    folder: Path | None  # of the run, if it has one
    _silent: RankState | None = None  # the silent rank that the request is about
    _known: Sequence[int] = ()  # the progress at the last reported silence

    def __post_init__(self) -> None:
        self._start = Deadline()  # when to send a request
        self._end = Deadline()  # when to stop waiting for other nodes
        self._answers = dict[int, NodeStacks]()  # the answers, by node rank
        self._look = Deadline()  # when to check for the file, on node rank 0
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

    def receive(self, node: int, message: StackRequest | NodeStacks, peers: Peers) -> None:
        """Keep another node's answer, or answer its request; to node rank 0, schedule one to all.

        Blocks while the ranks here write the answer.
        """
        if isinstance(message, NodeStacks):
            self._add_answer(node, message, peers)
        elif self.ranks.node_rank == 0:
            self.ask()
        else:
            peers[node].send(self._collect_here())

    def on_time(self, peers: Peers) -> int | None:
        """Do what is due: act on the file and delete it, send a request, or end one.

        ASKED starts a request. Node rank 0 sends a request to all nodes, and blocks while the ranks
        here answer it; another node sends it to node rank 0. Returns the rank that holds up the run
        if the run must end because of it, otherwise None.
        """
        if self._look.expire() and self.folder:
            self._look.set_within(limits.ASKED_LOOK_S)
            with contextlib.suppress(OSError):  # no file means no request
                (self.folder / ASKED).unlink()
                self.ask()

        if self._start.expire() and not self._answers:  # otherwise a request is in progress
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

    def _add_answer(self, node: int, answer: NodeStacks, peers: Peers) -> None:
        """Keep a node's answer, unless it is late; stop waiting once all nodes have answered."""
        if node == 0 or self._answers:  # otherwise the request has ended
            self._answers[node] = answer
        if 0 in self._answers and self._answers.keys() >= peers.keys():
            self._end.set_within(0.0)

    def _conclude(self, peers: Collection[int]) -> int | None:
        """End the request. Returns the rank that is stuck if the run must end because of it.

        Otherwise, shows the answers, also appends them to SHOWN, and returns None. If the run ends,
        its failure has the stacks. `peers` are the other nodes.
        """
        answered = [rank for node in self._answers.values() for rank in node.ranks]
        unheard = [f"{self.hosts[node]}: no answer" for node in peers if node not in self._answers]
        silent = self._silent
        self._silent = None
        self._answers.clear()

        stacks = {each.rank: each.frames for each in answered}
        head = "where the ranks are, innermost call first:"
        if silent is not None:
            awaited = stuck.find_awaited(silent, stacks)
            if silent.ends_run:
                return silent.rank if awaited is None else awaited
            head = f"{_describe_silence(silent, awaited)}; {head}"

        calls = {each.rank: each.calls for each in answered if each.calls}
        lines = [head, *name_groups(stuck.group_stacks(stacks)), *unheard, *find_mismatches(calls)]
        text = "\n  ".join(printable(line, LONGEST) for line in lines)
        self.show(text)
        if self.folder:
            with contextlib.suppress(OSError), open_own(self.folder / SHOWN, "a") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        return None


def _describe_silence(silent: RankState, awaited: int | None) -> str:
    """Return how long the ranks have made no step, and which rank the others wait for."""
    step = silent.progress[0]
    when = "since the ranks started"
    if step >= 0:
        when = f"more than 10 times the longest gap between steps, after step {step}"
    who = "all ranks are at the same point" if awaited is None else f"rank {awaited} is behind"
    # The parent is the supervisor, which forwards the signal.
    again = f"kill -QUIT {os.getppid()} repeats this; HANG_SECONDS=N ends a hung run"
    return f"no step for {silent.silence_s:.0f} s, {when}: {who}; {again}"
