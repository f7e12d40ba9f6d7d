"""Fan-out over ssh: check every node, start its agent, forward signals, wait for all to end.

One connection to each node carries everything (connection.py): requests and the control stream in
one direction, messages and output in the other. far_side.py is the program at the other end.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from signal import Signals

from distributed.environment import printable
from distributed.errors import REFUSED, Refused
from distributed.stop_signals import NOTICES, QUERY, stop_signals
from launcher import handshake
from launcher.failure_block import print_outcome
from launcher.fanout.connection import (
    AT_ONCE,
    Connection,
    greet,
    name_variables,
    write_opening,
)
from launcher.fanout.launch_end import judge_end
from launcher.fanout.loop import Loop, Show, given_options
from launcher.fanout.nodes import Nodes, Silence
from launcher.fanout.swap import choose_master, find_ill, swap
from launcher.interrupt import code_for_shell, leave_unstarted
from launcher.plan.own import find_own, read_begun
from launcher.plan.plan import Plan, print_commands, print_plan
from launcher.preflight import compare
from launcher.preflight.compare import Finding
from launcher.screen import View, has_one_screen
from launcher.terminal import Terminal
from launcher.text import LONGEST_ROW, count, print_row
from launcher.wire import limits
from launcher.wire.messages import Cut, Exit, Hello, Report, Start, StopRequest


def run(plan: Plan, be_ready: Callable[[], None]) -> int:
    """Start the run on its nodes and wait for its end. Returns the exit code.

    Raises PlanError or Refused if nothing was started.
    """
    return Fanout(plan).run(be_ready)


class Fanout:
    """A run on nodes that ssh reaches."""

    def __init__(self, plan: Plan) -> None:
        self.own = find_own(plan, read_begun())
        self.plan = name_variables(plan, self.own.names)
        self.token = os.urandom(16).hex()
        self.saving_s = 0 if plan.engine else plan.grace_s  # for agents to save a snapshot
        self.secret = handshake.new_secret()
        self.slack_s = len(plan.nodes) // 10  # each key exchange takes time here
        self.connections: list[Connection] = []
        self.silence = Silence(self.connections, plan.silence_s)
        self.nodes = Nodes(self.connections, self.connect, can_change=plan.min_nodes > 0)
        self.started = 0.0  # seconds since the epoch; 0 until then
        self.stopped_by: Signals | None = None
        self.close_at = math.inf  # when to close the control streams
        self.beat_at = 0.0

    def run(self, be_ready: Callable[[], None]) -> int:
        if self.plan.is_dry_run:
            print_commands(self.plan, self.paste_line)
            return 0
        self.require_tools()
        self.loop = Loop(self.plan.environ, most_children=len(self.plan.nodes) + 1)
        self.terminals = Terminals()
        self.err = self.terminals.err
        try:
            self.own.ask(self.plan, self.say)
            reports = self.check_nodes()
            if reports is None:
                self.nodes.end_hung(self.loop)
                return REFUSED
            be_ready()
            self.start_nodes(reports)
            self.watch()
            return self.report_end()
        finally:
            self.loop.close()
            self.err.drain(limits.DRAIN_S)

    def require_tools(self) -> None:
        if shutil.which("ssh") is None:
            raise Refused("env-missing", "ssh is not installed here; install OpenSSH's client")

    def say(self, text: str) -> None:
        print(f"{self.plan.program}: {printable(text, LONGEST_ROW)}", file=self.err.text)

    # --- the preflight ------------------------------------------------------------------------

    def check_nodes(self) -> list[Report] | None:
        """Connect to all nodes, check them and print the plan. Returns None on a refusal."""
        began, plan = time.monotonic(), self.plan
        within_s = self.slack_s + plan.preflight_s
        if not plan.has_checks:  # the user wants to start anyway, and a login may be slow
            within_s = max(within_s, int(plan.join_timeout_s))
        waited_s, answer_by = within_s - limits.CHECKS_S, began + within_s
        for number in range(len(plan.nodes)):
            self.connections.append(self.connect_node(number))
            if number % AT_ONCE == AT_ONCE - 1:
                self.wait_for(Hello, time.monotonic() + limits.CONNECT_PACE_S)
        greet(self.connections, self.connect_node, self.turn, began + waited_s)
        hellos = [node.answer(Hello) for node in self.connections]
        left_s = answer_by - time.monotonic()
        self.plan = choose_master(self.plan, hellos)
        request = self.plan.request(  # if a hello is missing, no node waits for the others
            meeting_size=self.plan.num_agents if all(hellos) else 0,
            within_s=max(1.0, min(left_s - 2, 0.75 * left_s)),  # the rest is to start and to answer
        )
        for number, node in enumerate(self.plan.nodes):
            self.connections[number].ask(replace(request, node_rank=number, nproc=node.nproc))
        self.wait_for(Report, answer_by + limits.NVIDIA_SMI_S * all(hellos))  # it may be slow
        answers = [node.answer(Report) for node in self.connections]
        reports = [report for report in answers if report]
        silent = [
            Finding(node.name, node.explain_silence(waited_s))
            for node in self.connections
            if node.answer(Report) is None
        ]
        outcome = compare.judge(reports, time.monotonic() - began)
        outcome = replace(outcome, findings=[*silent, *outcome.findings])
        plan, out = self.plan, sys.stderr if plan.is_detached else self.err.text
        refuses = compare.print_findings(outcome, plan.program, is_strict=plan.is_strict, out=out)
        if swapped := swap(plan, find_ill(plan, answers)):
            self.plan, changes = swapped
            self.say("; ".join(changes))
            for connection in self.connections:
                connection.terminate()
            self.connections.clear()
            self.token = os.urandom(16).hex()
            return self.check_nodes()
        if refuses:
            return None
        counts = [report.nproc for report in reports[: plan.num_nodes]]
        print_plan(plan, reports[0], outcome, counts, out)
        return reports

    def connect_node(self, number: int) -> Connection:
        node, show = self.plan.nodes[number], self.terminals.show_behind(b"[%d] " % number)
        return self.connect(node.name, f"{self.token}.{number}", show)  # two may share a machine

    def connect(self, node: str, token: str, show: Show) -> Connection:
        at_start_s = max(limits.SSH_CONNECT_S, self.plan.preflight_s - limits.CHECKS_S - 1)
        connect_s = (limits.SSH_CONNECT_S if self.started else at_start_s) + self.slack_s
        connection = Connection(self.loop, node, connect_s=connect_s, token=token, show=show)
        added = {**self.own.of_node(node), "LAUNCH_TOKEN": token, "RUN_SECRET": self.secret}
        connection.send_line(write_opening(self.plan, added))
        return connection

    def wait_for(self, kind: type, until: float) -> None:
        """Wait until every node has sent an answer of this kind, or its connection has ended."""
        while time.monotonic() < until and any(
            node.code is None and node.answer(kind) is None for node in self.connections
        ):
            self.turn(until)

    # --- the run ------------------------------------------------------------------------------

    def start_nodes(self, reports: Sequence[Report]) -> None:
        self.started = time.time()
        for connection, report in zip(self.connections, reports, strict=True):
            connection.start(self.start_request(report, connection))

    def start_request(self, report: Report, node: Connection) -> Start:
        plan, nproc = self.plan, report.nproc
        command = plan.agent_command(nproc=nproc, port=report.port, node_rank=report.node_rank)
        variables = {**plan.run_variables(), **self.own.of_node(node.name, nproc)}
        return Start(command, variables, plan.directory)

    def watch(self) -> None:
        """Wait until every node's part has ended; at `close_at`, close the control streams."""
        while any(node.code is None and not node.is_left for node in self.connections):
            until = self.close_at
            if (now := time.monotonic()) >= until:
                until += limits.CONTROL_END_S
                for node in self.connections:
                    node.close_input()
            if now > until:
                return
            self.turn(until)

    def turn(self, until: float) -> None:
        """Handle events until this time or the next heartbeat."""
        now = time.monotonic()
        if now >= self.beat_at:
            self.beat_at = now + limits.BEAT_S
            for node in self.connections:
                node.beat()
        until = min(until, self.beat_at, self.silence.due() if self.is_open else math.inf)
        if self.terminals.is_waiting:
            until = min(until, now + limits.PARTIAL_S)
        for signum in self.loop.wait(until - now):
            self.forward_signal(signum)
        self.terminals.show_held(now)
        self.silence.note_turn(is_ending=self.close_at < math.inf)
        for node in self.connections:
            self.check_end(node)
        for line in self.silence.news() if self.is_open else ():
            self.say(line)
        for node in self.silence.find() if self.is_open else ():
            self.lose(node, f"no heartbeat for {self.plan.silence_s:g} s (network down?)")
            node.terminate()
        for node in self.nodes.leave_behind():
            self.say(f"continuing without {node.name}")
        if self.nodes.is_overdue(self.saving_s):
            self.close_within(0)

    def lose(self, node: Connection, why: str) -> None:
        """Record that a node's part of the run has ended early.

        This ends a run that cannot lose a node. If the node is silent, the others may save first.
        """
        if node.lost:
            return
        node.lose(why, is_silent=time.monotonic() - node.heard > limits.GAP_S)
        self.say_lost(node)
        if not self.nodes.can_change:
            self.close_within(self.saving_s if node.is_silent else 0)
        self.nodes.sweep(node)

    def say_lost(self, node: Connection) -> None:
        self.say(f"{node.name}: {node.lost}{' [link-lost]' if node.is_silent else ''}")

    def forward_signal(self, signum: Signals) -> None:
        """Forward a signal to every node; the agents decide how to act on it."""
        is_query = signum == QUERY and QUERY not in stop_signals()
        if not (self.started or is_query):
            leave_unstarted(signum)
        if signum not in NOTICES and not is_query:
            self.stopped_by = signum
            self.close_within(self.plan.grace_s + limits.STOP_CLOSE_S)
        for node in self.nodes.current[:1] if is_query else self.connections:
            if node.is_started:
                node.ask(StopRequest(signum))  # for stacks, node rank 0 asks the others

    def check_end(self, node: Connection) -> None:
        """Check whether and how a node's part of the run has ended."""
        is_cut = node.answer(Cut) is not None
        has_ended = node.answer(Exit) is not None and not is_cut
        if not self.started:
            node.look_for_fault()
        elif node.is_left or (has_ended and self.nodes.can_change):
            pass
        elif has_ended:
            if self.close_at == math.inf:
                for silent in self.silence.recall():
                    self.say_lost(silent)
            may_save = any(other.is_silent for other in self.connections)
            self.close_within(self.nodes.others_s + (self.saving_s if may_save else 0))
        elif (node.code is not None or is_cut) and self.is_open:
            which = "the pdsh connection" if is_cut else "the ssh connection"
            words = "" if is_cut else node.last_words
            self.lose(node, f"{which} has ended{words and ': '}{words}")

    @property
    def is_open(self) -> bool:
        """Whether the run continues, and the control streams are open."""
        return self.started > 0 and time.monotonic() < self.close_at

    def close_within(self, seconds: float) -> None:
        self.close_at = min(self.close_at, time.monotonic() + seconds)

    # --- the end ------------------------------------------------------------------------------

    def report_end(self) -> int:
        """Print how the run ended. Returns its exit code."""
        plan = self.plan
        within_s = limits.SSH_CONNECT_S + self.slack_s + limits.CONTROL_END_S
        unreachable = self.nodes.find_unreachable(self.loop, within_s)
        for node, why in unreachable.items():
            self.say(f"{node.name}: {why}")
        parts = self.nodes.parts(unreachable)
        stopped_by = self.stopped_by or 0
        outcome = judge_end(plan, parts, self.started, stopped_by, self.silence.still_s)
        if left := sum(ended.left for node in self.connections if (ended := node.answer(Exit))):
            self.say(f"{count(left, 'process', 'processes')} of the run had to be killed")
        where = "on the reachable nodes" if unreachable else f"on {count(len(plan.nodes), 'node')}"
        self.terminals.out.drain(limits.DRAIN_S)
        err = self.err.text
        print_row("ended", f"code {outcome.code}; nothing is left running {where}", err)
        print_outcome(outcome, err, plan.folder)
        return code_for_shell(outcome.code, {self.stopped_by})

    def paste_line(self, node: str, line: str) -> str:
        """Return a command line that runs a shell line on a node; Ctrl-C ends it there."""
        command = ["ssh", "-t", *given_options(self.plan.environ), "--", node]
        return f"{shlex.join(command)} {quote_line(line)}"


class Terminals:
    """The launcher's stdout and stderr, which show the streams of all nodes."""

    def __init__(self) -> None:
        self.out = Terminal(1)
        self.err = self.out if has_one_screen() else Terminal(2)
        self.is_waiting = False  # an unfinished line is not shown yet
        self._views: list[View] = []

    def show_behind(self, prefix: bytes) -> Show:
        """Return a function that shows one program's output; no data means the end of a stream."""
        screens = self.out, self.err
        views = [View(screen, is_alone=False, prefix=prefix) for screen in screens]
        self._views += views

        def show(data: bytes, is_error: bool) -> None:
            view, screen = views[is_error], screens[is_error]
            if data:
                view.add(data)
                return
            view.end()
            if screen.open_by is view:
                screen.end_line()

        return show

    def show_held(self, now: float) -> None:
        """Show lines that have been unfinished for a while.

        `now` is a time before the nodes were last read.
        """
        self.is_waiting = bool([view for view in self._views if view.show_held(now)])


def quote_line(line: str) -> str:
    """Quote a shell line for another shell, in a readable form if possible."""
    is_plain = "'" in line and not {*line} & {*'"$`\\!'}
    return f'"{line}"' if is_plain else shlex.quote(line)
