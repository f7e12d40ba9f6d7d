"""Fan-out over ssh: check every node, start its agent, forward signals, wait for all to end.

One connection to each node carries everything (connection.py): requests and the control stream in
one direction, messages and output in the other. far_side.py is the program at the other end.
"""

import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from signal import Signals

from distributed.environment import printable
from distributed.errors import REFUSED, Refused
from distributed.stop_signals import NOTICES, QUERY, stop_signals
from launcher import handshake
from launcher.failure_block import print_outcome
from launcher.fanout.connection import Connection, name_variables, wait_for, write_opening
from launcher.fanout.launch_end import LaunchEnd
from launcher.fanout.loop import Loop, Show, given_options
from launcher.fanout.nodes import Nodes, Silence
from launcher.fanout.swap import choose_master, find_ill, replace_ill
from launcher.fanout.terminals import Terminals
from launcher.interrupt import code_for_shell, leave_unstarted
from launcher.plan.own import find_own, read_begun
from launcher.plan.plan import BeReady, Plan, print_commands, print_plan
from launcher.preflight import compare
from launcher.preflight.compare import Finding
from launcher.text import LONGEST_ROW, count, print_row
from launcher.wire import limits
from launcher.wire.messages import Cut, Exit, Hello, Report, Start, StopRequest


def run(plan: Plan, be_ready: BeReady) -> int:
    """Start the run on its nodes and wait for its end. Returns the exit code.

    Raises PlanError or Refused if nothing was started.
    """
    return Fanout(plan).run(be_ready)


class Fanout:
    """A run on nodes that ssh reaches. Raises PlanError as forwarded_names() does."""

    def __init__(self, plan: Plan) -> None:
        self.own = find_own(plan, read_begun())  # in a PBS job, asks qstat
        self.plan = name_variables(plan, self.own.names)
        self.token = os.urandom(16).hex()
        self.saving_s = 0 if plan.engine else plan.grace_s  # for agents to save a snapshot
        self.secret = handshake.new_secret()
        self.slack_s = len(plan.nodes) // 10  # each key exchange takes time here
        self.connections = list[Connection]()
        self.silence = Silence(self.connections, plan.silence_s)
        self.nodes = Nodes(self.connections, self.connect, can_change=plan.min_nodes > 0)
        self.started = 0.0  # seconds since the epoch; 0 until then
        self.stopped_by = 0  # the signal that was passed on, if it asked for a stop
        self.close_at = math.inf  # when to close the control streams
        self.beat_at = 0.0

    def run(self, be_ready: BeReady) -> int:
        """Start the run and wait for its end. Returns the exit code: REFUSED if a check fails."""
        if self.plan.is_dry_run:
            print_commands(self.plan, self.paste_line)
            return 0
        self.require_tools()
        self.loop = Loop(self.plan.environ, most_children=len(self.plan.nodes) + 1)
        self.terminals = Terminals()
        try:
            self.own.fetch_values(self.plan, self.say)
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
            self.terminals.err.drain(limits.DRAIN_S)

    def require_tools(self) -> None:
        if not shutil.which("ssh"):
            raise Refused("env-missing", "ssh is not installed here; install OpenSSH's client")

    def say(self, text: str) -> None:
        print(f"{self.plan.program}: {printable(text, LONGEST_ROW)}", file=self.terminals.err.text)

    # --- the preflight ------------------------------------------------------------------------

    def check_nodes(self) -> list[Report] | None:
        """Connect to all nodes, check them, replace faulty ones by spares, and print the plan.

        Returns the reports, by node rank; None if the start is refused. Raises Refused as well.
        """
        began = time.monotonic()
        within_s = self.slack_s + self.plan.preflight_s
        if not self.plan.has_checks:  # the user wants to start anyway, and a login may be slow
            within_s = max(within_s, int(self.plan.join_timeout_s))
        hello_s = within_s - limits.CHECKS_S
        self.nodes.connect_all(self.connect_node, len(self.plan.nodes), self.turn, began + hello_s)
        self.request_reports(began + within_s)

        plan = self.plan
        answers = [node.answer(Report) for node in self.connections]
        reports = [report for report in answers if report]
        unheard = [node for node in self.connections if not node.answer(Report)]
        silent = [Finding(node.name, node.explain_silence(hello_s)) for node in unheard]
        outcome = compare.combine(reports, silent, time.monotonic() - began)
        out = sys.stderr if plan.is_detached else self.terminals.err.text
        refuses = compare.print_findings(outcome, plan.program, is_strict=plan.is_strict, out=out)

        if swapped := replace_ill(plan, find_ill(plan, answers)):
            self.plan, changes = swapped
            self.say("; ".join(changes))
            self.nodes.disconnect_all()
            self.token = os.urandom(16).hex()  # the old one marks processes that may be left
            return self.check_nodes()
        if refuses:
            return None
        counts = [report.nproc for report in reports[: plan.num_nodes]]
        print_plan(plan, reports[0], outcome, counts, out)
        return reports

    def request_reports(self, until: float) -> None:
        """Choose the master, have every node check itself, and wait: longer if all said hello."""
        hellos = [node.answer(Hello) for node in self.connections]
        left_s = until - time.monotonic()
        self.plan = choose_master(self.plan, hellos)
        request = self.plan.request(  # if a hello is missing, no node waits for the others
            meeting_size=self.plan.num_agents if all(hellos) else 0,
            within_s=max(1.0, min(left_s - 2, 0.75 * left_s)),  # the rest is to start and to answer
        )
        for number, node in enumerate(self.plan.nodes):
            self.connections[number].ask(replace(request, node_rank=number, nproc=node.nproc))
        if all(hellos):
            until += limits.NVIDIA_SMI_S
        wait_for(Report, self.connections, self.turn, until)

    def connect_node(self, number: int) -> Connection:
        """Connect to the node with this number. Two numbers may share a machine."""
        show = self.terminals.make_show(b"[%d] " % number)
        return self.connect(self.plan.nodes[number].name, f"{self.token}.{number}", show)

    def connect(self, node: str, token: str, show: Show) -> Connection:
        """Start ssh to a node, and send it the commands that start the far side there."""
        at_start_s = max(limits.SSH_CONNECT_S, self.plan.preflight_s - limits.CHECKS_S - 1)
        connect_s = (limits.SSH_CONNECT_S if self.started else at_start_s) + self.slack_s
        connection = Connection(self.loop, node, connect_s=connect_s, token=token, show=show)
        added = {**self.own.of_node(node), "LAUNCH_TOKEN": token, "RUN_SECRET": self.secret}
        connection.send_line(write_opening(self.plan, added))
        return connection

    # --- the run ------------------------------------------------------------------------------

    def start_nodes(self, reports: Sequence[Report]) -> None:
        """Send each node its start request, and set `started`. `reports` are by node rank."""
        self.started = time.time()
        for connection, report in zip(self.connections, reports, strict=True):
            connection.start(self.start_request(report, connection))

    def start_request(self, report: Report, node: Connection) -> Start:
        """Return the request that starts the agent of the node that sent this report."""
        plan, nproc = self.plan, report.nproc
        command = plan.agent_command(nproc=nproc, port=report.port, node_rank=report.node_rank)
        variables = {**plan.run_variables(), **self.own.of_node(node.name, nproc)}
        return Start(command, variables, plan.directory)

    def watch(self) -> None:
        """Wait until all connections have ended; at `close_at`, close the control streams."""
        while any(node.code is None and not node.is_left for node in self.connections):
            now = time.monotonic()
            until = self.close_at
            if now >= until:
                until += limits.CONTROL_END_S
                for node in self.connections:
                    node.close_input()
            if now > until:
                return  # report_end() ends what is left
            self.turn(until)

    def turn(self, until: float) -> None:
        """Handle events until this time or the next heartbeat, and act on what has changed."""
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
        self.silence.detect_suspension(is_ending=self.close_at < math.inf)
        for node in self.connections:
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
            node.terminate()

    def lose(self, node: Connection, why: str) -> None:
        """Give up on a node whose part of the run has ended early, and end what is left there.

        This ends a run that cannot lose a node. If the node is silent, the others may save first.
        """
        if node.lost:
            return
        node.lose(why, is_silent=time.monotonic() - node.heard > limits.GAP_S)
        self.say(node.describe_loss())
        if not self.nodes.can_change:
            self.close_within(self.saving_s if node.is_silent else 0)
        self.nodes.sweep(node)

    def forward_signal(self, signum: Signals) -> None:
        """Forward a signal to all nodes, SIGQUIT to node rank 0; a stop sets a time for the end."""
        is_query = signum == QUERY and QUERY not in stop_signals()
        if not (self.started or is_query):
            leave_unstarted(signum)  # exits
        if signum not in NOTICES and not is_query:
            self.stopped_by = signum
            self.close_within(self.plan.grace_s + limits.STOP_CLOSE_S)
        for node in self.nodes.current[:1] if is_query else self.connections:
            if node.is_started:
                node.ask(StopRequest(signum))  # for stacks, node rank 0 asks the others

    def handle_end(self, node: Connection) -> None:
        """If a node's part of the run, or its connection, has ended, end the run if necessary."""
        is_cut = node.answer(Cut)
        has_ended = node.answer(Exit) and not is_cut
        if not self.started:
            node.start_probe()  # why ssh has not reached it
        elif node.is_left or (has_ended and self.nodes.can_change):
            pass  # the run continues without it, or the agents decide whether it does
        elif has_ended:
            if self.close_at == math.inf:  # the first node to end
                for silent in self.silence.blame_recent():
                    self.say(silent.describe_loss())
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
        """End what is left on the nodes, and print how the run ended. Returns its exit code."""
        plan = self.plan
        within_s = limits.SSH_CONNECT_S + self.slack_s + limits.CONTROL_END_S
        unreachable = self.nodes.sweep_unreported(self.loop, within_s)
        for node, why in unreachable.items():
            self.say(f"{node.name}: {why}")
        parts = self.nodes.parts(unreachable)
        end = LaunchEnd(plan, parts, self.started, self.stopped_by, self.silence.still_s).outcome()
        if killed := self.nodes.num_killed:
            self.say(f"{count(killed, 'process', 'processes')} of the run had to be killed")
        where = "on the reachable nodes" if unreachable else f"on {count(len(plan.nodes), 'node')}"
        self.terminals.out.drain(limits.DRAIN_S)
        err = self.terminals.err.text
        print_row("ended", f"code {end.code}; nothing is left running {where}", err)
        print_outcome(end, err, plan.folder)
        return code_for_shell(end.code, {self.stopped_by})

    def paste_line(self, node: str, line: str) -> str:
        """Return a command line that runs a shell line on a node; Ctrl-C ends it there."""
        command = ["ssh", "-t", *given_options(self.plan.environ), "--", node]
        return f"{shlex.join(command)} {quote_line(line)}"


def quote_line(line: str) -> str:
    """Quote a shell line for another shell, in a readable form if possible."""
    is_plain = "'" in line and not {*line} & {*'"$`\\!'}
    return f'"{line}"' if is_plain else shlex.quote(line)
