"""The launcher's half of a run on several nodes, whatever reaches them.

Check every node, start the agents, forward signals, decide when to give up, wait for all to end.
ssh.py, pdsh.py and srun.py say how the nodes are reached, and what ends with them.
"""

import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from signal import Signals
from typing import Generic

from distributed.environment import printable
from distributed.errors import REFUSED
from distributed.stop_signals import NOTICES, QUERY, Interrupts, stop_signals
from launcher.fanout.loop import Loop
from launcher.fanout.nodes import N, Nodes, Silence, Way
from launcher.fanout.swap import find_ill
from launcher.fanout.terminals import Terminals
from launcher.interrupt import leave_unstarted
from launcher.plan.plan import BeReady, Plan, print_plan
from launcher.preflight import compare
from launcher.preflight.compare import Finding, Preflight
from launcher.text import LONGEST_ROW
from launcher.wire import limits
from launcher.wire.messages import Exit, Fault, Report, StopRequest


class Fanout(ABC, Generic[N]):
    """A run on several nodes, each of which runs the far side (far_side.py)."""

    def __init__(self, plan: Plan, everyone: Sequence[N], ways: Sequence[Way]) -> None:
        """`everyone` is by the node rank that each node starts with. reach() fills both."""
        self.plan = plan
        self.ways = ways
        self.terminals = Terminals()
        self.token = os.urandom(16).hex()
        self.saving_s = 0 if plan.engine else plan.grace_s  # for agents to save a snapshot
        self.nodes = Nodes(everyone, can_change=plan.min_nodes > 0)
        self.silence = Silence(everyone, plan.silence_s)
        self.started = 0.0  # seconds since the epoch; 0 until then
        self.asked = list[Signals]()  # the signals that ask for a stop and were passed on
        self.interrupts = Interrupts()
        self.close_at = math.inf  # when to close the control streams
        self.beat_at = 0.0

    def run(self, be_ready: BeReady) -> int:
        """Start the run and wait for its end. Returns the exit code: REFUSED if a check fails."""
        self.loop = Loop(self.plan.environ, most_children=len(self.plan.nodes) + 1)
        try:
            checked = self.check_nodes()
            if checked is None:
                self.end_refused()
                return REFUSED
            return self.run_checked(*checked, be_ready)
        finally:
            self.loop.close()
            self.drain()

    def run_checked(
        self, reports: Sequence[Report], preflight: Preflight, be_ready: BeReady
    ) -> int:
        """Show the plan, and run it to its end. Returns the exit code."""
        self.show_plan(reports, preflight)
        be_ready()
        return self.run_agents(reports)

    def say(self, text: str) -> None:
        print(f"{self.plan.program}: {printable(text, LONGEST_ROW)}", file=self.terminals.err.text)

    # --- how the nodes are reached ------------------------------------------------------------

    @abstractmethod
    def reach(self) -> None:
        """Start the far sides, have every node check itself, and wait for the reports."""

    @abstractmethod
    def explain_silences(self) -> Mapping[int, Fault]:
        """Return why nodes have not reported, by the node ranks that the others wait for."""

    @abstractmethod
    def swap(self, ill: Collection[int]) -> tuple[Plan, list[str]] | None:
        """Return the plan in which spares replace these node ranks, and the changes in words."""

    @abstractmethod
    def disconnect(self) -> None:
        """End the far sides at once, before reach() starts others."""

    def end_refused(self) -> None:
        """After a refusal, end what is left on the nodes."""
        self.disconnect()

    @abstractmethod
    def start_agents(self, reports: Sequence[Report]) -> None:
        """Send each node its start request. `reports` are by node rank."""

    @abstractmethod
    def send(self, request: StopRequest, nodes: Sequence[N]) -> None:
        """Send a request to all nodes, or to one of them."""

    def handle_cut(self, node: N) -> None:
        """Handle a node that can no longer be reached, and has not reported its end."""

    def end_lost(self, node: N) -> None:
        """End what is left on a node that the launcher has given up on."""

    @abstractmethod
    def report_end(self) -> int:
        """End what is left, and print how the run ended. Returns its exit code."""

    # --- the preflight ------------------------------------------------------------------------

    def check_nodes(self) -> tuple[list[Report], Preflight] | None:
        """Reach all nodes, check them, and replace faulty ones by spares.

        Returns the reports, by node rank, and what they say together; None if the start is refused.
        Raises Refused as well.
        """
        began = time.monotonic()
        self.reach()
        plan = self.plan
        answers = [node.answer(Report) for node in self.nodes.everyone]
        reports = [report for report in answers if report]
        silent = self.explain_silences() if len(reports) < len(answers) else {}
        findings = [Finding(self.nodes.everyone[rank].name, silent[rank]) for rank in silent]
        outcome = compare.combine(reports, findings, time.monotonic() - began)
        self.drain()
        refuses = compare.print_findings(
            outcome, plan.program, is_strict=plan.is_strict, out=sys.stderr
        )

        # Without any report, only silence tells which nodes are ill.
        if swapped := self.swap(find_ill(plan, answers) if reports else silent.keys()):
            self.plan, changes = swapped
            self.say("; ".join(changes))
            self.disconnect()
            self.token = os.urandom(16).hex()  # the old one marks processes that may be left
            return self.check_nodes()
        return None if refuses else (reports, outcome)

    def show_plan(self, reports: Sequence[Report], preflight: Preflight) -> None:
        plan = self.plan
        counts = plan.rank_counts(reports[0].nproc)
        if plan.nodes:  # they may differ
            counts = [report.nproc for report in reports[: plan.num_nodes]]
        print_plan(plan, reports[0], preflight, counts)

    # --- the run ------------------------------------------------------------------------------

    def run_agents(self, reports: Sequence[Report]) -> int:
        """Start the agents, and wait for the end of the run. Returns its exit code."""
        self.started = time.time()
        self.start_agents(reports)
        self.watch()
        return self.report_end()

    def watch(self) -> None:
        """Wait until all nodes are disconnected; at `close_at`, close the control streams."""
        while any(node.code is None and not node.is_left for node in self.nodes.everyone):
            now = time.monotonic()
            until = self.close_at
            if now >= until:
                until += limits.CONTROL_END_S
                for way in self.ways:
                    way.close_input()
            if now > until:
                return  # report_end() ends what is left
            self.turn(until)

    def turn(self, until: float) -> None:
        """Handle events until this time or the next heartbeat, and act on what has changed."""
        now = time.monotonic()
        if now >= self.beat_at:
            self.beat_at = now + limits.BEAT_S
            for way in self.ways:
                way.beat()

        until = min(until, self.beat_at, self.silence.due() if self.is_open else math.inf)
        if self.terminals.is_waiting:
            until = min(until, now + limits.PARTIAL_S)
        for signum in self.loop.wait(until - now):
            self.forward_signal(signum)

        self.terminals.show_held(now)
        self.silence.detect_suspension(is_ending=self.close_at < math.inf)
        if self.started:
            for node in self.nodes.everyone:
                self.handle_end(node)
        self.handle_silence()
        for node in self.nodes.leave_behind():
            self.say(f"continuing without {node.name}")
        if self.nodes.check_deadline(self.saving_s):
            self.close_within(0)

    def handle_silence(self) -> None:
        """Name the nodes that are silent or heard again, and give up on those silent for long."""
        if not self.is_open:
            return
        for line in self.silence.describe():
            self.say(line)
        for node in self.silence.find_lost():
            self.lose(node, f"no heartbeat for {self.plan.silence_s:g} s (network down?)")
            node.cut_off()

    def lose(self, node: N, why: str) -> None:
        """Give up on a node whose part of the run has ended early, and end what is left there.

        This ends a run that cannot lose a node. If the node is silent, the others may save first.
        """
        if node.lost:
            return
        node.lose(why, is_silent=time.monotonic() - node.heard > limits.GAP_S)
        self.say(node.describe_loss())
        if not self.nodes.can_change:
            self.close_within(self.saving_s if node.is_silent else 0)
        self.end_lost(node)

    def forward_signal(self, signum: Signals) -> None:
        """Forward a signal to all nodes, SIGQUIT to node rank 0; a stop sets a time for the end."""
        is_query = signum == QUERY and QUERY not in stop_signals()
        if not self.started:
            if not is_query:
                self.stop_early(signum)
            return
        if not is_query:
            self.asked.append(signum)
            if signum not in NOTICES:
                self.close_within(self.plan.grace_s + limits.STOP_CLOSE_S)
            if signum == Signals.SIGINT and self.interrupts.record_and_check():
                self.close_within(limits.CONTROL_END_S)  # the agents kill their ranks at once
        nodes = self.nodes.current[:1] if is_query else self.nodes.everyone
        self.send(StopRequest(signum), nodes)  # for stacks, node rank 0 asks the others

    def stop_early(self, signum: Signals) -> None:
        """Handle a signal that comes before the agents start: exit."""
        self.drain()
        leave_unstarted(signum)

    def handle_end(self, node: N) -> None:
        """If a node's part of the run, or its connection, has ended, end the run if necessary."""
        has_ended = node.answer(Exit)
        if node.is_left or (has_ended and self.nodes.can_change):
            pass  # the run continues without it, or the agents decide whether it does
        elif has_ended:
            if self.close_at == math.inf:  # the first node to end
                for silent in self.silence.blame_recent():
                    self.say(silent.describe_loss())
            may_save = any(other.is_silent for other in self.nodes.everyone)
            self.close_within(self.nodes.others_s + (self.saving_s if may_save else 0))
        elif node.code is not None and self.is_open:
            self.handle_cut(node)

    @property
    def is_open(self) -> bool:
        """Whether the run continues, and the control streams are open."""
        return self.started > 0 and time.monotonic() < self.close_at

    def close_within(self, seconds: float) -> None:
        self.close_at = min(self.close_at, time.monotonic() + seconds)

    def drain(self) -> None:
        """Wait until the terminal has accepted what was shown, but not for long."""
        for terminal in (self.terminals.out, self.terminals.err):
            terminal.drain(limits.DRAIN_S)
