"""Fan-out through pdsh, which only triggers the start of the agents.

pdsh does not forward stdin, and ps shows its command. So the launcher's own ssh connections carry
everything else: on each node, far_side.py waits for pdsh's process, and starts the agent when that
process connects.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from distributed.errors import Refused
from launcher.fanout.connection import FAR_SIDE, Connection
from launcher.fanout.loop import Child, fixed_options, given_options
from launcher.fanout.ssh import Fanout, quote_line
from launcher.plan.plan import Plan
from launcher.wire import limits
from launcher.wire.messages import Ready, Report, Start


def run(plan: Plan, be_ready: Callable[[], None]) -> int:
    """Start the run on its nodes and wait for its end. Returns the exit code."""
    return PdshFanout(plan).run(be_ready)


class PdshFanout(Fanout):
    """A run on nodes whose agents pdsh starts."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.socket = os.urandom(16).hex()  # begins each socket's name; a node rank follows
        self.pdsh: Child | None = None

    def require_tools(self) -> None:
        if shutil.which("pdsh") is None:
            cure = "install it, or use launch_torchrun_auto.sh"
            raise Refused("env-missing", f"pdsh is not installed here; {cure}")
        super().require_tools()

    def start_nodes(self, reports: Sequence[Report]) -> None:
        super().start_nodes(reports)
        self.wait_for(Ready, time.monotonic() + limits.PDSH_READY_S + self.slack_s)

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
        command += ["-t", str(limits.PDSH_CONNECT_S + self.slack_s), remote]

        self.pdsh = Child(self.loop, command, self.terminals.show_behind(b""))
        self.pdsh.close_input()

    def start_request(self, report: Report, node: Connection) -> Start:
        start = super().start_request(report, node)
        return replace(start, socket=f"{self.socket}.{report.node_rank}")

    def check_end(self, node: Connection) -> None:
        super().check_end(node)
        if self.pdsh is not None and self.pdsh.code is not None:
            self.close_within(self.nodes.others_s)

    def paste_line(self, node: str, line: str) -> str:
        options = shlex.quote(" ".join(["-tt", *given_options(self.plan.environ)]))
        words = f"-w {shlex.quote(node)} {quote_line(line.replace('%', '%%'))}"
        return f"PDSH_SSH_ARGS_APPEND={options} pdsh -R ssh -S {words}"
