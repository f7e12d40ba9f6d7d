"""Start a run: the one program that every entry script hands its words to.

    python scripts/lib/start.py FANOUT [OPTIONS] -- ARGS      (launch in scripts/lib/launch.sh)

It makes the plan, has the config checked, and lets the fan-out do the rest: check the nodes, print
the plan, start the agents, wait for them. A fan-out is a module with one function, `run`, which
calls what it is given when nothing is left to refuse, before it starts the first agent.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distributed.environment import LauncherError, job_id
from distributed.errors import BAD_INPUT, REFUSED, Refused
from distributed.hostlist import HostlistError
from launcher import typed_json
from launcher.plan.idle import find_idle
from launcher.plan.make_plan import make_plan
from launcher.plan.plan import Batch, Plan, PlanError
from launcher.plan.slurm import end_chain
from launcher.plan.typed import parse
from launcher.record import detach, run_json, runs
from launcher.text import mend_streams, short_host_name


@dataclass(frozen=True)
class ConfigFacts:
    """What a launcher must know of a config: `train.py --check --json`."""

    backend: str
    join_timeout: float
    checkpoint_dir: str
    task_file: str
    prepare: str
    batch: Batch
    num_workers: int


def main(arguments: Sequence[str]) -> int:
    """Start a run, or answer about runs; returns the exit code."""
    code = 1
    try:
        code = start(arguments)
    except SystemExit as leave:  # a wrong config, a stop before the start
        code = int(leave.code or 0)
        raise
    finally:
        end_chain(code, os.environ)
    return code


def start(arguments: Sequence[str]) -> int:
    """Start a run; returns its exit code."""
    mend_streams()
    typed = parse(arguments)
    if typed.fanout in ("status", "stop", "stacks"):
        return runs.main(typed)
    try:
        if typed.fanout == "submit":
            return int(importlib.import_module("launcher.plan.submit_with_config").run(typed))
        plan = make_plan(typed)
        if plan.fanout == "check":
            check_config(plan)
            return 0
        if idle := find_idle(plan, os.environ):
            print(f"{typed.program}: warning: {idle}", file=sys.stderr)
        be_ready = prepare(plan, typed.typed[0])
        fanout = importlib.import_module(f"launcher.fanout.{plan.fanout}")
        code = int(fanout.run(check_config(plan), be_ready))
        run_json.note_end(plan.log_dir / plan.run_id, code)
        return code
    except Refused as error:
        print(f"{typed.program}: {short_host_name()}: {error}", file=sys.stderr)
        return REFUSED
    except (PlanError, LauncherError, HostlistError) as error:
        print(f"{typed.program}: {error}", file=sys.stderr)
        return BAD_INPUT


def prepare(plan: Plan, script: str) -> Callable[[], None]:
    """Return what a fan-out calls when nothing is left to refuse, before it starts an agent.

    With --detach, this goes on in a child process, which the call takes from the terminal. Raises
    PlanError where a detached run has no name, and Refused where a live run has its name.
    """
    if plan.is_dry_run:
        return lambda: None
    folder = plan.log_dir / plan.run_id
    is_first = plan.node_rank == 0
    if is_first and not job_id(os.environ):  # a scheduler may start its job again beside the first
        run_json.refuse_live(folder)
    leave_terminal = detach.fork_launcher(plan, script) if plan.is_detached else None

    def be_ready() -> None:
        if leave_terminal is not None:
            leave_terminal()
        if is_first:
            grace, job = float(plan.grace_s), run_json.this_start()
            run_json.note_start(folder, detached=plan.is_detached, grace=grace, job=job)

    return be_ready


def check_config(plan: Plan) -> Plan:
    """Have train.py check the config and the settings; returns the plan with what they say.

    A script of the user's own checks itself, once it runs. Raises Refused where train.py cannot run
    here. Where the config is wrong, this exits with BAD_INPUT.
    """
    steps = plan.step_options()
    if not plan.is_ours or (steps and "SLURM_JOB_ID" not in os.environ):  # no step, no pyxis
        return plan
    environ = dict(os.environ)
    environ.pop("WORLD_SIZE", None)
    if all(node.nproc for node in plan.nodes) and (plan.nodes or plan.nproc):
        environ["WORLD_SIZE"] = str(sum(plan.rank_counts(0)))
    here = replace(plan, staged="", python=sys.executable) if plan.staged else plan  # no node yet
    command = [here.python, *plan.words, "--check", "--json"]
    if steps:  # of pyxis
        print(f"{plan.program}: loading {plan.container}", file=sys.stderr)
        srun = importlib.import_module("launcher.fanout.srun")
        command = srun.node_step(replace(plan, num_nodes=1), [], command, os.environ)
    result = here.run_inside(command, env=environ, capture_output=True)
    if result.returncode == BAD_INPUT:
        sys.stderr.write(result.stderr)
        raise SystemExit(BAD_INPUT)
    if result.returncode != 0:
        words = (result.stderr or result.stdout).strip().splitlines() or ["no word"]
        where = f" in {plan.container}" if plan.container else ""
        cause = f"{plan.python} cannot run train.py{where} ({words[-1]})"
        cure = "PYTHON is a path inside" if plan.container else "run make setup, or set PYTHON"
        raise Refused("env-missing", f"{cause}; {cure}")
    facts = typed_json.parse(ConfigFacts, result.stdout)
    return replace(
        plan,
        container=plan.container and plan.container.with_folder(Path(facts.checkpoint_dir)),
        backend=plan.backend if plan.backend != "auto" else facts.backend,
        join_timeout_s=facts.join_timeout,
        checkpoint_dir=Path(facts.checkpoint_dir),
        task_file=facts.task_file,
        prepare=facts.prepare,
        batch=facts.batch,
        num_workers=facts.num_workers,
    )
