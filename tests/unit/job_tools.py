"""Shared by the tests of SLURM jobs: a plan, and scripts that replace SLURM's programs."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.plan.plan import Plan


def make_tool(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


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
    )
    return replace(plan, **changes)
