"""Has train.py check the config and the settings before anything is started or queued."""

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path

from distributed.errors import BAD_INPUT, REFUSED, Refused
from launcher import typed_json
from launcher.plan.plan import ConfigFacts, Plan
from launcher.plan.typed import fields_of
from launcher.text import PlanError, warn


def check_config(plan: Plan) -> Plan:
    """Have train.py check the config and the settings. Returns the plan with the facts found.

    Returns the plan unchanged, without a check, if the script is the user's own, or if only a step
    of a job could load the container. Otherwise waits for train.py. Raises Refused if train.py
    cannot run here, MessageError if it prints something else, and PlanError if the config names a
    checkpoint that does not exist. Exits with train.py's code if that has printed the cause: the
    config is wrong, or PyYAML is missing.
    """
    is_loadable = "SLURM_JOB_ID" in plan.environ or not plan.step_options()  # pyxis needs a step
    if not (plan.is_ours and is_loadable):
        return plan

    answer = typed_json.parse_json(_run_check(plan))
    resume = answer.pop("resume")  # a checkpoint, auto or never
    facts = typed_json.decode(ConfigFacts, answer)
    folder = facts.checkpoint_dir or Path()
    has_own = (folder / plan.run_id).exists()  # the run's own checkpoints come before `resume`
    names_file = resume not in ("auto", "never") and not has_own
    is_node = plan.fanout in ("local", "srun")  # otherwise the file may exist only on the nodes
    if names_file and is_node and not os.path.exists(os.path.expanduser(resume)):
        raise PlanError(f"resume: there is no {resume!r}; correct the path")

    facts = replace(
        facts,
        backend=plan.backend.replace("auto", facts.backend),
        task_file=facts.task_file.removeprefix(f"{Path.cwd()}/"),  # it may differ on other nodes
    )
    container = plan.container and plan.container.with_folder(folder)
    return replace(plan, **fields_of(ConfigFacts, facts), container=container)


def _run_check(plan: Plan) -> str:
    """Run `train.py --check --json` and return what it prints; see check_config for the errors.

    With pyxis, this is a step on one node of the job; says so, because it may load the image first.
    """
    counts = plan.rank_counts(0)  # 0: one per GPU
    world_size = str(sum(counts)) if all(counts) else ""  # "": not known yet
    command = [plan.python, *plan.words, "--check", "--json"]
    if plan.step_options():  # for pyxis
        warn(f"{plan.program}: loading {plan.container}")
        steps = importlib.import_module("launcher.fanout.steps")
        command = steps.node_step(replace(plan, num_nodes=1), [], command)

    environ = {**plan.environ, "WORLD_SIZE": world_size}
    result = plan.run_inside(command, env=environ, capture_output=True)
    if result.returncode in (BAD_INPUT, REFUSED):  # stderr has the cause
        sys.stderr.write(result.stderr)
        raise SystemExit(result.returncode)
    if result.returncode != 0:
        words = (result.stderr or result.stdout).strip().splitlines() or ["no output"]
        where = f" in {plan.container}" if plan.container else ""
        cause = f"{plan.python} cannot run train.py{where} ({words[-1]})"
        cure = "set PYTHON to a path inside it" if plan.container else "set PYTHON to another"
        raise Refused("env-missing", f"{cause}; {cure}")
    return result.stdout
