"""The srun fan-out: commands, nodes that do not answer, requeues. Real jobs: tests/cluster."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from captured import captured

from distributed.errors import Refused
from launcher.fanout import srun
from launcher.plan.plan import Plan, PlanError
from launcher.preflight.check_node import Report, write_report
from launcher.typed_json import encode


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(
        program="x.sh",
        fanout="srun",
        command="x.sh c.yaml",
        root=tmp_path,
        python="/python",
        directory=tmp_path,
        log_dir=Path("logs"),
        run_id="mine",
        words=["own.py", "a b"],
        hosts="node[1-3]",
        num_nodes=3,
        checkpoint_dir=Path("checkpoints"),
    )


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tools that comes first in PATH."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def make_tool(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


# --- commands -----------------------------------------------------------------------------------


def test_agents_get_all_that_the_job_has_and_the_variables_of_the_run(plan: Plan) -> None:
    environ = captured("batch-step", SLURM_JOB_CPUS_PER_NODE="64,32(x2)")
    command = srun.step_command(plan, nproc=2, port=1234, environ=environ)
    assert command[:3] == ["env", "--unset=SLURM_GPUS_PER_TASK", "srun"]
    agent = command.index("env", 1)
    assert command[3:agent] == [
        *("--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=32"),
        *("--job-name=mine", "--gpus-per-node=2", "--kill-on-bad-exit=1"),
    ]
    assert command[agent:][:4] == ["env", "RUN_ID=mine", "LAUNCH_COMMAND=x.sh c.yaml", "/python"]
    assert "--node-rank" not in command  # which the agent takes from the step
    assert command[-2:] == ["own.py", "a b"]


@pytest.mark.parametrize(
    ("given", "forwarded"),
    [
        (None, None),
        ("ALL", None),
        ("ALL,MINE=1", None),
        ("NONE", "PATH,HOME,RUN_SECRET"),
        ("NIL", "PATH,HOME,RUN_SECRET"),
        ("MINE=1,OTHER", "MINE=1,OTHER,PATH,HOME,RUN_SECRET"),
    ],
)
def test_srun_forwards_the_secret_whatever_sbatch_exports(
    given: str | None, forwarded: str | None
) -> None:
    environ = {} if given is None else {"SLURM_EXPORT_ENV": given}
    first, second = srun.secret_variables(environ), srun.secret_variables(environ)
    assert first.get("SLURM_EXPORT_ENV") == forwarded
    assert len(bytes.fromhex(first["RUN_SECRET"])) == 32
    assert first["RUN_SECRET"] != second["RUN_SECRET"]


def test_one_task_for_each_rank(plan: Plan) -> None:
    plan = Plan(**{**vars(plan), "engine": "srun"})
    environ = captured("batch-step", SLURM_GPUS_PER_NODE="8", SLURM_CPUS_PER_TASK="4")
    command = srun.step_command(plan, nproc=2, port=1234, environ=environ)
    assert command[:3] == ["env", "SLURM_GPUS_PER_NODE=2", "srun"]
    assert {"--kill-on-bad-exit=1", "--job-name=mine", "--cpus-per-task=4"} <= {*command}
    assert command[-5:] == ["OMP_NUM_THREADS=1", "/python", "-u", "own.py", "a b"]
    with pytest.raises(PlanError, match=r"SLURM_TASKS_PER_NODE=2\(x2\), for 4 ranks .*-world\]$"):
        srun.step_command(plan, nproc=4, port=1234, environ=environ)


# --- the preflight ------------------------------------------------------------------------------


def report(node_rank: int) -> str:
    found = Report(node_rank, 3, 1, f"node{node_rank + 1}", "mine", {}, {}, port=1234)
    return "\n".join(write_report(found))


@pytest.mark.parametrize(
    ("answered", "end", "fault", "cause"),
    [
        ([0, 2], "exit 127", "env-missing", "did not start on node2, see above; let "),
        ([2], "exit 1", "node-missing", "from node1 node2 (srun's exit code is 1, see above)"),
        (
            [0, 1],
            "exec sleep 60",
            "node-missing",
            "from node3 (srun's exit code is 143, see above)",
        ),
    ],
)
def test_a_node_that_does_not_answer_is_named(
    plan: Plan,
    tools: Path,
    monkeypatch: pytest.MonkeyPatch,
    answered: list[int],
    end: str,
    fault: str,
    cause: str,
) -> None:
    monkeypatch.setattr(srun, "PREFLIGHT_S", 1.0)
    lines = "\n".join(report(node_rank) for node_rank in answered)
    make_tool(tools / "srun", f"cat <<'END'\nof the prolog\n{lines}\nEND\n{end}")
    with pytest.raises(Refused) as raised:
        srun.check_nodes(plan)
    assert raised.value.fault == fault
    assert cause in str(raised.value) and "\n" not in str(raised.value)


def test_reports_come_by_node_rank(plan: Plan, tools: Path) -> None:
    lines = "\n".join(report(node_rank) for node_rank in (2, 0, 1))
    make_tool(tools / "srun", f"printf '%s\\0' \"$@\" >asked; cat <<'END'\n{lines}\nEND")
    os.chdir(plan.directory)
    assert [found.node_rank for found in srun.check_nodes(plan)] == [0, 1, 2]
    *_, module, request = Path("asked").read_text().rstrip("\0").split("\0")
    assert module == "launcher.preflight.check_node"
    assert request == encode(plan.request(meeting_size=3))


# --- requeues -----------------------------------------------------------------------------------


def test_three_restarts_without_a_new_step_end_the_job(
    plan: Plan, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queued = plan.directory / "queued"
    make_tool(tools / "scontrol", f'echo "$*" >>"{queued}"')
    latest = plan.directory / "checkpoints/mine/latest"
    latest.parent.mkdir(parents=True)
    job, task = captured("requeued-batch-step"), captured("array-batch-step")
    for step, environ in [(5, job), (5, job), *[(9, task)] * 5]:
        latest.unlink(missing_ok=True)
        latest.symlink_to(f"step-{step}")
        assert srun.requeue(plan, environ)
    assert queued.read_text().splitlines() == ["requeue 11"] * 2 + ["requeue 5_5"] * 3
    told = "x.sh: 3 restarts gained no step; the job is not requeued\n"
    assert capsys.readouterr().err == told * 2


def test_a_requeue_that_slurm_refuses(plan: Plan, tools: Path) -> None:
    make_tool(tools / "scontrol", "exit 1")
    assert not srun.requeue(plan, captured("salloc-command"))


# --- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("squeue", "cancelled", "expected"),
    [  # what squeue does, the steps that scancel gets, the signal that srun gets
        (
            "printf '7.0 other\\n7.1 mine\\n7.batch batch\\n7.2 mine too\\n'",
            "--signal=TERM 7.1",
            "",
        ),
        ("echo 7.0 other", "", "SIGTERM"),
        ("exit 1", "", "SIGUSR1"),
    ],
)
def test_a_stop_reaches_our_step_alone(
    tools: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, cancelled: str, expected: str
) -> None:
    make_tool(tools / "squeue", squeue)
    make_tool(tools / "scancel", f'echo "$*" >"{tools}/cancelled"')
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        srun.stop_step("mine", sleeper)
        if not expected:
            sleeper.kill()
        code = sleeper.wait()
    assert -code == (signal.Signals[expected] if expected else signal.SIGKILL)
    asked = tools / "cancelled"
    assert (asked.read_text().strip() if asked.exists() else "") == cancelled
