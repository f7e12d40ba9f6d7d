"""Start a run: what launcher/cli/main.py calls when it has read the command line.

It makes the plan, has the config checked, and lets the fan-out do the rest: check the nodes, print
the plan, start the agents, wait for them. A fan-out is a module with one function, `run`, which
calls `be_ready()` after the last check, before it starts the first agent.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable

from distributed.environment import LauncherError
from distributed.errors import BAD_INPUT, REFUSED, Refused
from distributed.hostlist import HostlistError
from launcher.plan import pbs, resume
from launcher.plan.check_config import check_config
from launcher.plan.idle import find_idle
from launcher.plan.make_plan import make_plan
from launcher.plan.pbs import find_short_delay
from launcher.plan.plan import Plan, PlanError
from launcher.plan.slurm import end_chain
from launcher.plan.typed import Typed
from launcher.record import detach, run_json, runs
from launcher.text import short_host_name


def main(typed: Typed) -> int:
    """Start a run, or answer about runs; returns the exit code."""
    code = 1
    try:
        code = start(typed)
    except SystemExit as leave:  # a wrong config, a stop before the start
        code = int(leave.code or 0)
        raise
    finally:
        end_chain(code, os.environ)
    return code


def start(typed: Typed) -> int:
    """Start a run; returns its exit code."""
    if typed.fanout in ("status", "stop", "stacks"):
        return runs.main(typed)
    try:
        if typed.fanout == "submit":
            return int(importlib.import_module("launcher.plan.submit_with_config").run(typed))
        resume.forward_given(os.environ, pbs.note_job(os.environ))
        plan = make_plan(typed)
        if plan.fanout == "check":
            check_config(plan)
            return 0
        is_saving = plan.node_rank == 0 and not typed.module
        short = find_short_delay(plan.grace_s, os.environ) if is_saving else ""
        for warning in filter(None, (find_idle(plan, os.environ), short)):
            print(f"{typed.program}: warning: {warning}", file=sys.stderr)
        be_ready = prepare(plan, typed.typed[0])
        fanout = importlib.import_module(f"launcher.fanout.{plan.fanout}")
        code = int(fanout.run(check_config(plan), be_ready))
        run_json.note_end(plan.folder, code)
        return code
    except Refused as error:
        print(f"{typed.program}: {short_host_name()}: {error}", file=sys.stderr)
        if error.fault == "run-is-live":
            os.environ.pop("CHAIN", None)  # it needs the jobs that would resume it
        return REFUSED
    except (PlanError, LauncherError, HostlistError) as error:
        name = "" if re.search(r" \[[a-z-]+\]$", str(error)) else " [config-invalid]"
        print(f"{typed.program}: {error}{name}", file=sys.stderr)
        return BAD_INPUT


def prepare(plan: Plan, script: str) -> Callable[[], None]:
    """Return what a fan-out calls when nothing is left to refuse, before it starts an agent.

    With --detach, this goes on in a child process, which the call takes from the terminal. Raises
    PlanError where a detached run has no name, and Refused where a live run has its name.
    """
    if plan.is_dry_run:
        return lambda: None
    is_first = plan.node_rank == 0
    if is_first:
        run_json.refuse_live(plan.folder)
    leave_terminal = detach.fork_launcher(plan, script) if plan.is_detached else None

    def be_ready() -> None:
        if is_first:
            grace, job = float(plan.grace_s), run_json.this_start()
            run_json.note_start(plan.folder, detached=plan.is_detached, grace=grace, job=job)
        if leave_terminal is not None:
            leave_terminal()

    return be_ready
