"""Fan-out over ssh: check every node, start its agent, pass on signals, wait for the end of all.

One connection to each node carries everything (connection.py): requests and the control stream one
way, messages and output the other. At the far end is node.py.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from signal import Signals

from distributed.errors import Refused
from launcher import compare, protocol
from launcher.compare import Finding, Outcome
from launcher.connection import Connection
from launcher.failure import End, Failure, RunSummary, count, print_end
from launcher.plan import Plan, PlanError, node_comment, print_plan, print_row
from launcher.preflight import Report, check_node, short_host_name
from launcher.protocol import Cut, Exit, Hello, Start, Sweep
from launcher.remote import Loop, Terminal

ANSWER_S = 9.0  # for every node to connect and to be checked
CHECK_S = 3.0  # of these, for the checks at least
CONNECT_S = 5
BEAT_S = 2.0
OTHERS_S = 5.0  # once a node has ended, for the others
END_S = 10.0  # beyond GRACE, for a stop; after the end of the control streams, for the nodes
DRAIN_S = 2.0  # at the end, for a slow terminal
LOST = 137  # exit code of a run that has lost a node
FORWARDED = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "WANDB_", "CUDA_VISIBLE_DEVICES")


def run(plan: Plan) -> int:
    """Start the run on its nodes, and wait for its end; returns the exit code.

    Raises:
        PlanError, Refused: nothing was started.
    """
    return Fanout(plan).run()


class Interrupted(Exception):
    """A stop signal came before the start."""


class Fanout:
    """A run on nodes that ssh reaches."""

    def __init__(self, plan: Plan) -> None:
        self.plan = replace(plan, forwarded=forwarded_names(plan.activated, os.environ))
        self.token = os.urandom(16).hex()
        self.slack_s = len(plan.nodes) // 10  # each key exchange takes some of our time
        self.connections: list[Connection] = []
        self.is_started = False
        self.stopped_by: Signals | None = None
        self.close_at: float | None = None  # when the control streams end
        self.beat_at = 0.0

    def run(self) -> int:
        if self.plan.is_dry_run:
            return self.print_commands()
        self.require_tools()
        self.loop, self.out, self.err = Loop(), Terminal(1), Terminal(2)
        try:
            reports = self.check_nodes()
            if reports is None:
                return 3
            self.start_nodes(reports)
            self.watch()
            return self.conclude(self.look_again())
        except Interrupted as interrupt:
            (signum,) = interrupt.args
            self.say(f"stopped by {signum.name}; nothing was started")
            return 128 + int(signum)
        finally:
            self.loop.close()
            self.err.drain(DRAIN_S)

    def require_tools(self) -> None:
        if shutil.which("ssh") is None:
            raise Refused("env-missing", "there is no ssh here; install OpenSSH's client")

    def say(self, text: str) -> None:
        print(f"{self.plan.program}: {text}", file=self.err.text)

    # --- the preflight ------------------------------------------------------------------------

    def check_nodes(self) -> list[Report] | None:
        """Connect to all nodes and check them; returns their reports, None where one refuses."""
        plan = self.plan
        began = time.monotonic()
        answer_by = began + ANSWER_S + self.slack_s
        for number, node in enumerate(plan.nodes):
            self.connections.append(self.connect(node.name, self.token, partial(self.show, number)))
        waited_s = answer_by - CHECK_S - began
        self.wait_for(Hello, began + waited_s)
        self.choose_master()
        num_there = sum(one.answer(Hello) is not None for one in self.connections)
        request = self.plan.request(
            meeting_size=num_there if num_there == plan.num_nodes else 0,
            within_s=max(1.0, answer_by - time.monotonic() - 2),
        )
        for number, (node, connection) in enumerate(zip(plan.nodes, self.connections, strict=True)):
            mine = replace(request, node_rank=number, nproc=node.nproc)
            connection.send(protocol.write(mine))
        self.wait_for(Report, answer_by)
        findings: list[Finding] = []
        reports = [one.answer(Report) for one in self.connections]
        for connection, report in zip(self.connections, reports, strict=True):
            if report is None:
                findings.append(Finding(connection.node, connection.explain_silence(waited_s)))
            else:
                findings += [Finding(report.host, fault) for fault in report.faults]
        there = [report for report in reports if report is not None]
        return self.judge(there, findings, time.monotonic() - began)
