"""Fan-out over ssh: one connection to each node carries everything (connection.py).

Requests and the control stream go in one direction, messages and output in the other.
far_side.py is the program at the other end.
"""

import os
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from distributed.errors import Refused
from distributed.stop_signals import NOTICES
from launcher import handshake
from launcher.failure_block import print_outcome
from launcher.fanout.connection import Connection, name_variables, write_opening
from launcher.fanout.fanout import Fanout
from launcher.fanout.launch_end import LaunchEnd
from launcher.fanout.loop import Loop, Show, given_options
from launcher.fanout.nodes import wait_for
from launcher.fanout.swap import choose_master, replace_ill
from launcher.interrupt import code_for_shell
from launcher.plan.own import find_own, read_begun
from launcher.plan.plan import BeReady, Plan, print_commands
from launcher.text import count, print_row
from launcher.wire import limits
from launcher.wire.messages import Exit, Fault, Hello, Report, Start, StopRequest, Sweep

AT_ONCE = 8  # new connections: sshd drops some once 10 are waiting to log in
TRIES = 4


def run(plan: Plan, be_ready: BeReady) -> int:
    """Start the run on its nodes and wait for its end. Returns the exit code.

    Raises PlanError or Refused if nothing was started.
    """
    return SshFanout(plan).run(be_ready)


class SshFanout(Fanout[Connection]):
    """A run on nodes that ssh reaches. Raises PlanError as forwarded_names() does."""

    def __init__(self, plan: Plan) -> None:
        self.own = find_own(plan, read_begun())  # in a PBS job, asks qstat
        self.connections = list[Connection]()  # by the node rank that each node started with
        super().__init__(name_variables(plan, self.own.names), self.connections, self.connections)
        self.secret = handshake.new_secret()
        self.slack_s = len(plan.nodes) // 10  # each key exchange takes time here
        self.hello_s = 0.0  # that a node had to say hello
        self.sweeps = Sweeps(self.connect)

    def run(self, be_ready: BeReady) -> int:
        """Print the commands of a dry run, or do what every fan-out does. Returns the same."""
        if self.plan.is_dry_run:
            print_commands(self.plan, self.paste_line)
            return 0
        self.require_tools()
        self.own.fetch_values(self.plan, self.say)
        return super().run(be_ready)

    def require_tools(self) -> None:
        if not shutil.which("ssh"):
            raise Refused("env-missing", "ssh is not installed here; install OpenSSH's client")

    # --- the preflight ------------------------------------------------------------------------

    def reach(self) -> None:
        """Connect to all nodes, have them check themselves, and wait for the reports."""
        began = time.monotonic()
        within_s = self.slack_s + self.plan.preflight_s
        if not self.plan.has_checks:  # the user wants to start anyway, and a login may be slow
            within_s = max(within_s, int(self.plan.join_timeout_s))
        self.hello_s = within_s - limits.CHECKS_S
        self.connect_all(began + self.hello_s)
        self.request_reports(began + within_s)

    def connect_all(self, until: float) -> None:
        """Connect to all nodes. Wait until each has said hello or has failed, or until this time.

        If many connections arrive at once, an sshd, especially a bastion's, drops some
        (MaxStartups). If others succeed, the dropped ones are tried again, TRIES times in all,
        after longer pauses. `until` is monotonic time.
        """
        connections = self.connections
        for place in range(len(self.plan.nodes)):
            connections.append(self.connect_node(place))
            if place % AT_ONCE == AT_ONCE - 1:
                wait_for(Hello, connections, self.turn, time.monotonic() + limits.CONNECT_PACE_S)

        tries = [1] * len(connections)
        while (now := time.monotonic()) < until:
            has_way = any(connection.answer(Hello) for connection in connections)
            dropped = [
                place
                for place, connection in enumerate(connections)
                if has_way and connection.is_dropped and tries[place] < TRIES
            ]
            if not dropped and not any(connection.may_come for connection in connections):
                return

            for number, place in enumerate(dropped):  # not all at once, or sshd drops some again
                pause_s = (
                    limits.CONNECT_AGAIN_S * 2 ** tries[place] + limits.CONNECT_PACE_S * number
                )
                if now > connections[place].heard + pause_s:
                    tries[place] += 1
                    connections[place] = self.connect_node(place)
            self.turn(min(until, now + limits.CONNECT_AGAIN_S))

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

    def explain_silences(self) -> Mapping[int, Fault]:
        """Return why nodes have not reported. Waits for what finds that out, briefly."""
        return {
            place: node.explain_silence(self.hello_s)
            for place, node in enumerate(self.connections)
            if not node.answer(Report)
        }

    def swap(self, ill: Collection[int]) -> tuple[Plan, list[str]] | None:
        return replace_ill(self.plan, ill)

    def disconnect(self) -> None:
        """End all connections at once."""
        for connection in self.connections:
            connection.disconnect()
        self.connections.clear()

    def end_refused(self) -> None:
        """End what hangs, or was stopped, on nodes that did not report."""
        self.sweeps.end_hung(self.connections, self.loop)

    # --- the run ------------------------------------------------------------------------------

    def start_agents(self, reports: Sequence[Report]) -> None:
        """Send each node its start request. `reports` are by node rank."""
        for connection, report in zip(self.connections, reports, strict=True):
            connection.start(self.start_request(report, connection))

    def start_request(self, report: Report, node: Connection) -> Start:
        """Return the request that starts the agent of the node that sent this report."""
        plan, nproc = self.plan, report.nproc
        command = plan.agent_command(nproc=nproc, port=report.port, node_rank=report.node_rank)
        variables = {**plan.run_variables(), **self.own.of_node(node.name, nproc)}
        return Start(command, variables, plan.directory)

    def turn(self, until: float) -> None:
        """Do what every fan-out does. Before the start, find out why ssh has not reached a node."""
        super().turn(until)
        if not self.started:
            for connection in self.connections:
                connection.start_probe()

    def send(self, request: StopRequest, nodes: Sequence[Connection]) -> None:
        for node in nodes:
            node.ask(request)

    def handle_cut(self, node: Connection) -> None:
        """Give up on a node whose connection has ended."""
        words = node.last_words
        self.lose(node, f"the ssh connection has ended{words and ': '}{words}")

    def end_lost(self, node: Connection) -> None:
        """Connect again, to end what is left there."""
        self.sweeps.begin(node)

    # --- the end ------------------------------------------------------------------------------

    def report_end(self) -> int:
        """End what is left on the nodes, and print how the run ended. Returns its exit code."""
        plan = self.plan
        within_s = limits.SSH_CONNECT_S + self.slack_s + limits.CONTROL_END_S
        unreachable = self.sweeps.sweep_unreported(self.connections, self.loop, within_s)
        for node, why in unreachable.items():
            self.say(f"{node.name}: {why}")
        parts = self.nodes.parts(unreachable)
        stopped_by = next((signum for signum in reversed(self.asked) if signum not in NOTICES), 0)
        end = LaunchEnd(plan, parts, self.started, stopped_by, self.silence.still_s).outcome()
        if killed := self.nodes.num_killed:
            self.say(f"{count(killed, 'process', 'processes')} of the run had to be killed")
        where = "on the reachable nodes" if unreachable else f"on {count(len(plan.nodes), 'node')}"
        self.terminals.out.drain(limits.DRAIN_S)
        err = self.terminals.err.text
        print_row("ended", f"code {end.code}; nothing is left running {where}", err)
        print_outcome(end, err, plan.folder)
        return code_for_shell(end.code, {stopped_by})

    def paste_line(self, node: str, line: str) -> str:
        """Return a command line that runs a shell line on a node; Ctrl-C ends it there."""
        command = ["ssh", "-t", *given_options(self.plan.environ), "--", node]
        return f"{shlex.join(command)} {quote_line(line)}"


class Sweeps:
    """Second connections to nodes, to end the processes of a run that are left there."""

    def __init__(self, connect: Callable[[str, str, Show], Connection]) -> None:
        """`connect` gets a node's name for ssh, a token, and what shows output."""
        self._connect = connect
        self._newest = dict[Connection, Connection]()

    def begin(self, node: Connection) -> None:
        """Connect again to a lost node, to end the processes that are left there."""
        token = f"{os.urandom(16).hex()}.0"
        sweep = self._connect(node.name, token, lambda line, is_error: None)
        sweep.ask(Sweep(node.token))
        self._newest[node] = sweep

    def sweep_unreported(
        self, connections: Sequence[Connection], loop: Loop, within_s: float
    ) -> Mapping[Connection, str]:
        """Sweep the nodes that have not reported their end. Returns the unreachable ones, and why.

        Waits up to `within_s` for their answers. A node that was left behind is swept again if that
        has failed: it may be reachable by now.
        """
        for node in connections:
            if node.answer(Exit):
                continue
            sweep = self._newest.get(node)
            has_failed = sweep and sweep.code is not None and not sweep.answer(Exit)
            if not sweep or (node.is_left and has_failed):
                self.begin(node)

        self._await_all(loop, within_s)
        return {
            node: sweep.last_words for node, sweep in self._newest.items() if not sweep.answer(Exit)
        }

    def end_hung(self, connections: Sequence[Connection], loop: Loop) -> None:
        """After a refusal, end what hangs, or was stopped, on nodes that did not report. Waits."""
        for node in connections:
            is_there = node.answer(Hello) and node.code is None
            if is_there and not node.answer(Report):
                self.begin(node)
        self._await_all(loop, limits.SSH_CONNECT_S + limits.SWEEP_S)

    def _await_all(self, loop: Loop, within_s: float) -> None:
        """Wait until all second connections have ended, for up to `within_s`.

        Closes those that have reported. From here on, signals have no effect.
        """
        until = time.monotonic() + within_s
        sweeps = self._newest.values()
        while any(sweep.code is None for sweep in sweeps) and time.monotonic() < until:
            for sweep in sweeps:
                if sweep.answer(Exit):
                    sweep.close_input()  # which ends the far side, and with it ssh
            loop.wait(until - time.monotonic())


def quote_line(line: str) -> str:
    """Quote a shell line for another shell, in a readable form if possible."""
    is_plain = "'" in line and not {*line} & {*'"$`\\!'}
    return f'"{line}"' if is_plain else shlex.quote(line)
