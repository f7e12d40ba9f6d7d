"""Shared by the tests of SLURM jobs: a plan, and scripts that replace SLURM's programs."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.plan.plan import Plan
from launcher.wire import limits


def make_tool(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


USUAL: dict[str, Any] = {  # what a plan has if nothing else was asked for
    "is_ours": False,
    "config": "",
    "port": None,
    "engine": "",
    "max_restarts": 0,
    "grace_s": limits.GRACE_S,
    "silence_s": limits.SILENCE_S,
    "variables": {},
    "container": None,
    "has_checks": True,
    "preflight_s": 9,
}


def job_plan(folder: Path, **changes: Any) -> Plan:
    plan = Plan(
        program="x.sh",
        fanout="srun",
        command="x.sh c.yaml",
        root=folder,
        python="/python",
        directory=folder,
        log_dir=Path("logs"),
        run_id="mine",
        words=["own.py", "a b"],
        hosts="node[1-3]",
        job="7",
        environ=os.environ,
        num_nodes=3,
        checkpoint_dir=Path("checkpoints"),
        **USUAL,
    )
    return replace(plan, **changes)
