"""What a run leaves idle of its job, as a table of jobs and runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from captured import captured
from job_tools import job_plan

from launcher.plan.idle import find_idle
from launcher.plan.plan import NodePlan

SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
ALL = "run_ddp.sh uses all [partial-launch]"


@pytest.mark.parametrize(
    ("num_nodes", "nproc", "more", "line"),
    [
        (2, None, {}, ""),
        (2, 8, {}, ""),
        (2, 2, {}, f"this run uses 2 of the job's 8 GPUs on each node; {ALL}"),
        (1, 8, {}, f"this run uses 1 of the job's 2 nodes; {ALL}"),
        (2, 2, {"SLURM_GPUS_ON_NODE": ""}, ""),
        (
            *(2, 1, {"SLURM_GPUS_ON_NODE": "", "SLURM_GPUS_PER_NODE": "a100:2"}),
            f"this run uses 1 of the job's 2 GPUs on each node; {ALL}",
        ),
        (1, 2, {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "1"}, ""),
        (1, 2, {"SLURM_JOB_ID": ""}, ""),
    ],
)
def test_a_slurm_job(
    tmp_path: Path, num_nodes: int, nproc: int | None, more: dict[str, str], line: str
) -> None:
    environ = {**SLURM, **more}
    assert find_idle(job_plan(tmp_path, num_nodes=num_nodes, nproc=nproc, environ=environ)) == line


def test_the_shell_of_a_step_with_several_nodes(tmp_path: Path, shell: str) -> None:
    step = captured("srun-pty-step", SLURM_TASK_PID=shell)
    plan = job_plan(tmp_path, num_nodes=1, environ=step)
    assert find_idle(plan).startswith("this run uses 1 of the step's 2 nodes; give each")
    assert find_idle(replace(plan, environ={**step, "SLURM_STEP_NUM_NODES": "1"})) == ""


def test_a_pbs_job(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    (tmp_path / "gpus").write_text("a-gpu0\na-gpu1\nb-gpu0\nb-gpu1\n")
    job = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_GPUFILE": str(tmp_path / "gpus")}
    alone = job_plan(tmp_path, num_nodes=1, environ=job)
    assert find_idle(alone).startswith("this run uses 1 of the job's 2 nodes; ")
    nodes = (NodePlan("a", 2), NodePlan("b", 1))
    assert find_idle(replace(alone, num_nodes=2, nodes=nodes)).startswith("this run uses 1 of")
    assert find_idle(replace(alone, environ={"PBS_NODEFILE": "/nonexistent"})) == ""
