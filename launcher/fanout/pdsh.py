"""Fan-out through pdsh, which only triggers the start of the agents.

pdsh does not forward stdin, and ps shows its command. So the launcher's own ssh connections carry
everything else: on each node, far_side.py waits for pdsh's process, and starts the agent when that
process connects.
"""

import os
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

from distributed.errors import Refused
from launcher.fanout.connection import Connection
from launcher.fanout.loop import Child, fixed_options, given_options
from launcher.fanout.nodes import FAR_SIDE, wait_for
from launcher.fanout.ssh import SshFanout, quote_line
from launcher.plan.plan import BeReady, Plan
from launcher.wire import limits
from launcher.wire.messages import Cut, Ready, Report, Start


def run(plan: Plan, be_ready: BeReady) -> int:
    """Do what ssh.run() does, but let pdsh start the agents. Returns and raises the same."""
    return PdshFanout(plan).run(be_ready)


class PdshFanout(SshFanout):
    """A run on nodes whose agents pdsh starts."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.socket = os.urandom(16).hex()  # begins each socket's name; a node rank follows
        self.pdsh: Child | None = None

    def require_tools(self) -> None:
        """Raise Refused if this machine lacks pdsh or ssh."""
        if not shutil.which("pdsh"):
            cure = "install it, or use launch_torchrun_auto.sh"
            raise Refused("env-missing", f"pdsh is not installed here; {cure}")
        super().require_tools()

    def start_agents(self, reports: Sequence[Report]) -> None:
        """Send each node its start request, wait until all listen for pdsh, and start pdsh.

        After the wait's limit, it starts anyway, for the nodes that do listen.
        """
        super().start_agents(reports)
        ready_by = time.monotonic() + limits.PDSH_READY_S + self.slack_s
        wait_for(Ready, self.connections, self.turn, ready_by)

        self.pdsh = Child(self.loop, self.pdsh_command(), self.terminals.make_show(b""))
        self.pdsh.close_input()

    def pdsh_command(self) -> list[str]:
        """Return pdsh's command, which connects to the waiting far side on every node."""
        environ = self.plan.environ
        given = [environ.get(name, "") for name in ("PDSH_SSH_ARGS_APPEND", "SSH_OPTS")]
        options = " ".join([*given, *(f"-o {option}" for option in fixed_options())])
        names = [node.name for node in self.plan.nodes]

        words = self.plan.inside(self.plan.module_command(FAR_SIDE))
        if "LD_LIBRARY_PATH" in self.plan.forwarded:  # may lead to Python's own library
            words = ["env", f"LD_LIBRARY_PATH={environ['LD_LIBRARY_PATH']}", *words]
        # On every node, pdsh replaces %n with the node rank.
        remote = f"exec {shlex.join(words).replace('%', '%%')} --pdsh {self.socket}.%n"

        command = ["env", f"PDSH_SSH_ARGS_APPEND={options}", "pdsh", "-R", "ssh", "-S"]
        command += ["-f", str(len(names)), "-w", ",".join(names)]
        return [*command, "-t", str(limits.PDSH_CONNECT_S + self.slack_s), remote]

    def start_request(self, report: Report, node: Connection) -> Start:
        """Return the request of the ssh fan-out, with the socket on which the far side waits."""
        start = super().start_request(report, node)
        return replace(start, socket=f"{self.socket}.{report.node_rank}")

    def handle_end(self, node: Connection) -> None:
        """Do what the ssh fan-out does. If pdsh itself has ended, the nodes must end soon, too.

        A node whose pdsh connection has ended is lost, although ssh still reaches it.
        """
        if not node.answer(Cut):
            super().handle_end(node)
        elif not node.is_left and self.is_open:
            self.lose(node, "the pdsh connection has ended")
        if self.pdsh and self.pdsh.code is not None:
            self.close_within(self.nodes.others_s)

    def paste_line(self, node: str, line: str) -> str:
        """Return a command line that runs a shell line on a node through pdsh."""
        options = shlex.quote(" ".join(["-tt", *given_options(self.plan.environ)]))
        words = f"-w {shlex.quote(node)} {quote_line(line.replace('%', '%%'))}"
        return f"PDSH_SSH_ARGS_APPEND={options} pdsh -R ssh -S {words}"
