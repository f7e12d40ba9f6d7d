"""Where all ranks are: asked of every node on SIGQUIT, and when a script falls silent (no torch).

Each agent has its ranks write their stacks, and sends them to node rank 0's, which shows them. It
is also asked by a file, ASKED in the run's folder, and adds what it shows to another one there.
SLURM's notice of a time limit also comes by such a file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from distributed.environment import printable
from distributed.stop_signals import NOTICE
from launcher.agent.diagnosis import stuck
from launcher.agent.diagnosis.collectives import find_mismatches
from launcher.agent.diagnosis.stuck import RankState
from launcher.agent.node_ranks import NodeRanks
from launcher.own_time import Deadline
from launcher.record.run_json import ASKED, NOTICED, SHOWN
from launcher.wire import limits
from launcher.wire.messages import NodeStacks, RankStack, StackRequest
from launcher.wire.node_link import Link

LONGEST = 2000  # characters of a line that is shown


@dataclass
class Query:
    """One attempt's requests for the places of all ranks, one at a time."""

    ranks: NodeRanks
    hosts: Sequence[str]  # by node rank
    peers: Mapping[int, Link]
    show: Callable[[str], None]
    folder: Path | None  # of the run; None: it has none
    _look: Deadline = field(default_factory=Deadline)  # for the files, on node rank 0
    _start: Deadline = field(default_factory=Deadline)
    _end: Deadline = field(default_factory=Deadline)  # no more waiting for other nodes
    _told: dict[int, NodeStacks] = field(default_factory=dict)  # by node rank
    _silent: RankState | None = None  # the silence that the request is about
    _known: Sequence[int] = ()  # the progress at which there was one

    def __post_init__(self) -> None:
        if self.folder is not None and self.ranks.node_rank == 0:
            self._look.set_within(limits.ASKED_LOOK_S)

    @property
    def next_at(self) -> float:
        """When on_time() has something to do."""
        return min(self._look.at, self._start.at, self._end.at)

    def ask(self) -> None:
        """Show soon where all ranks are; a signal's handler may call this."""
        self._start.set_within(0.0)

    def ask_about(self, suspect: RankState) -> None:
        """Report a silence, or end the run because of it, once."""
        if self._known != suspect.progress:
            self._silent, self._known = suspect, suspect.progress
            self.ask()

    def receive(self, node: int, message: StackRequest | NodeStacks) -> None:
        if isinstance(message, NodeStacks):
            self._take(node, message)
        elif self.ranks.node_rank == 0:
            self.ask()
        else:
            self._send(self._here())

    def on_time(self) -> int | None:
        """Do what is due. Returns a rank that holds up the run, where the run is to end for it."""
        if self._look.take():
            self._look.set_within(limits.ASKED_LOOK_S)
            assert self.folder is not None
            for name, act in (ASKED, self.ask), (NOTICED, partial(signal.raise_signal, NOTICE)):
                with contextlib.suppress(OSError):  # it is not there: nobody asks
                    (self.folder / name).unlink()
                    act()
        if self._start.take() and not self._told:  # else it is asking
            self._send(StackRequest())
            if self.ranks.node_rank == 0:
                self._end.set_within(limits.STACKS_ANSWER_S)
                self._take(0, self._here())
        return self._conclude() if self._end.take() else None

    def _here(self) -> NodeStacks:
        stacks, calls = self.ranks.stacks(), self.ranks.collectives()
        return NodeStacks([RankStack(rank, at, calls.get(rank)) for rank, at in stacks.items()])

    def _send(self, message: StackRequest | NodeStacks) -> None:
        for peer in self.peers.values():
            peer.send(message)

    def _take(self, node: int, told: NodeStacks) -> None:
        self._told[node] = told
        if self._told.keys() >= {0, *self.peers}:
            self._end.set_within(0.0)

    def _conclude(self) -> int | None:
        """Show what the nodes have reported; for a silence, also which rank is behind."""
        everyone = [rank for node in self._told.values() for rank in node.ranks]
        places = {each.rank: each.frames for each in everyone}
        calls = {each.rank: each.calls for each in everyone if each.calls is not None}
        unheard = [self.hosts[node] for node in self.peers if node not in self._told]
        silent, self._silent = self._silent, None
        self._told.clear()
        head = "where the ranks are, innermost call first:"
        if silent is not None:
            odd = stuck.find_odd(silent, places)
            if silent.ends_run:
                return silent.rank if odd is None else odd
            step, when = silent.progress[0], "since the start of the ranks"
            if step >= 0:
                when = f"over 10 times the longest silence, after step {step}"
            who = "all ranks are in one place" if odd is None else f"rank {odd} is behind"
            again = f"kill -QUIT {os.getppid()} shows it again, HANG_SECONDS would end the run"
            head = f"no step for {silent.silence_s:.0f} s, {when}: {who}; {again}; {head}"
        lines = [head, *stuck.group_stacks(places), *(f"{host}: no answer" for host in unheard)]
        lines += find_mismatches(calls)
        text = "\n  ".join(printable(line, LONGEST) for line in lines)
        self.show(text)
        if self.folder is not None:
            with contextlib.suppress(OSError), (self.folder / SHOWN).open("a") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        return None
