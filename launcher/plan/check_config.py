"""Has train.py check the config and the settings before anything is started or queued."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path

from distributed.errors import BAD_INPUT, REFUSED, Refused
from launcher import typed_json
from launcher.plan.plan import ConfigFacts, Plan
from launcher.text import PlanError, warn


def check_config(plan: Plan) -> Plan:
    """Have train.py check the config and the settings. Returns the plan with the facts found.

    The user's own script is not checked. Raises Refused if train.py cannot run here, and PlanError
    if the config names a checkpoint that does not exist. Exits with train.py's code if that has
    printed the cause: the config is wrong, or PyYAML is missing.
    """
    steps = plan.step_options()
    if not plan.is_ours or (steps and "SLURM_JOB_ID" not in plan.environ):  # pyxis needs a step
        return plan

    counts = plan.rank_counts(0)  # 0: one per GPU
    world = {"WORLD_SIZE": str(sum(counts)) if all(counts) else ""}
    command = [plan.python, *plan.words, "--check", "--json"]
    if steps:  # for pyxis
        warn(f"{plan.program}: loading {plan.container}")
        srun = importlib.import_module("launcher.fanout.srun")
        command = srun.node_step(replace(plan, num_nodes=1), [], command)

    result = plan.run_inside(command, env={**plan.environ, **world}, capture_output=True)
    if result.returncode in (BAD_INPUT, REFUSED):
        sys.stderr.write(result.stderr)
        raise SystemExit(result.returncode)
    if result.returncode != 0:
        words = (result.stderr or result.stdout).strip().splitlines() or ["no output"]
        where = f" in {plan.container}" if plan.container else ""
        cause = f"{plan.python} cannot run train.py{where} ({words[-1]})"
        cure = "set PYTHON to a path inside it" if plan.container else "set PYTHON to another"
        raise Refused("env-missing", f"{cause}; {cure}")

    facts = typed_json.parse(ConfigFacts, result.stdout)
    folder = facts.checkpoint_dir or Path()
    is_new = not (folder / plan.run_id).exists()  # otherwise its own checkpoints come first
    is_here = facts.resume in ("auto", "never") or os.path.exists(os.path.expanduser(facts.resume))
    if is_new and not is_here and plan.fanout in ("local", "srun"):
        raise PlanError(f"resume: there is no {facts.resume!r}; correct the path")

    facts = replace(
        facts,
        backend=plan.backend.replace("auto", facts.backend),
        task_file=facts.task_file.removeprefix(f"{Path.cwd()}/"),  # it may differ on other nodes
    )
    container = plan.container and plan.container.with_folder(folder)
    return replace(plan, **vars(facts), container=container)
