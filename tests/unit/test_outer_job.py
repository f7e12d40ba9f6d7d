"""What a SLURM job inherits from the job in whose shell it was submitted."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from captured import captured
from job_tools import make_tool

from launcher.outer_job import leave_outer_job

# What slurmstepd does: it has a title, and starts a process that waits.
_STEPD = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
_LEFT = {  # of a step
    **{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "login1"},
    **{"SLURM_NTASKS": "7", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9", "SLURM_PTY_PORT": "9"},
}
Start = Callable[[str], str]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a process below a titled slurmstepd, and returns its id."""
    stepds: list[tuple[subprocess.Popen[str], str]] = []

    def start_one(title: str) -> str:
        wait = f"{_STEPD}; sys.stdin.read()"
        words = [f"slurmstepd: [{title}]", "-c", wait]
        stepd = subprocess.Popen(words, executable=sys.executable, stdin=-1, stdout=-1, text=True)
        assert stepd.stdout is not None
        stepds.append((stepd, stepd.stdout.readline().strip()))
        return stepds[-1][1]

    yield start_one
    for stepd, task in stepds:
        subprocess.run(["kill", "-KILL", task, str(stepd.pid)], check=True)
        stepd.communicate()


def left_of(environ: Mapping[str, str]) -> dict[str, str]:
    own = dict(environ)
    leave_outer_job(own)
    return own


def test_a_job_s_script_believes_no_variable_of_the_step_that_submitted_it(start: Start) -> None:
    own = {**captured("batch-step"), "SLURM_TASK_PID": start("7.batch"), "SLURM_JOB_ID": "7"}
    assert left_of(own) == own
    filters = {"SQUEUE_STATES": "PENDING", "SINFO_PARTITION": "x"}  # the user's, for the ranks too
    assert left_of({**own, **filters}) == {**own, **filters}
    gone = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE")  # 7 tasks are not this job's
    assert left_of({**own, **_LEFT}) == {name: own[name] for name in own if name not in gone}


def test_the_shell_of_salloc_in_a_step_is_no_task(start: Start) -> None:
    own = {"SLURM_JOB_ID": "8", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
    task = {"SLURM_TASK_PID": start("7.0"), "SLURM_PROCID": "0", "SLURM_GPUS_ON_NODE": "4"}
    assert left_of({**own, **_LEFT, **task}) == own


@pytest.mark.parametrize("title", ("7.3", "7.interactive", "no title"))
def test_a_step_keeps_its_variables(start: Start, title: str) -> None:
    own = {**captured("srun-step"), "SLURM_TASK_PID": start(title), "SLURM_JOB_ID": "7"}
    assert left_of(own) == own


@pytest.mark.parametrize(
    ("record", "keeps"),
    (
        ("JobId=7 ArrayJobId=5 ArrayTaskId=2 Restarts=1 TresPerNode=gres:gpu:2", True),
        ("JobId=7 Restarts=0 TRES=cpu=2,node=2", False),
    ),
)
def test_what_only_some_jobs_have_is_checked_with_the_job_s_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str, keeps: bool
) -> None:
    make_tool(tmp_path / "scontrol", f'[[ $* == "show job -o 7" ]] && echo "{record}"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    job = {"SLURM_JOB_ID": "7"}
    some = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "1"}
    some["SLURM_GPUS_PER_NODE"] = "2"
    assert left_of({**job, **some}) == (job | some if keeps else job)
    make_tool(tmp_path / "scontrol", "exit 1")
    assert left_of({**job, **some}) == job | some  # SLURM does not answer
