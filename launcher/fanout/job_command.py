"""A dry run of a batch script outside a job: show the command that submits the script."""

import shlex
from dataclasses import replace

from launcher.plan.plan import BeReady, Plan, print_plan


def run(plan: Plan, _be_ready: BeReady) -> int:
    """Print what is known about the job before it starts, and the command that submits it.

    Returns 0. `_be_ready`, which every fan-out gets, is not called, because nothing starts.
    """
    counts = plan.rank_counts(plan.nproc) if plan.nproc else []
    backend = plan.backend.replace("auto", "nccl with GPUs, else gloo")
    plan = replace(plan, run_id=plan.run_id or "<job id>", backend=backend)
    print_plan(plan, None, None, counts)
    size = "; set the job's size in the command" if plan.program.startswith("pbs") else ""
    print(f"# the command that submits this{size}; scheduler options go before the script")
    print(f"cd {shlex.quote(str(plan.directory))} && {plan.command}")
    return 0
