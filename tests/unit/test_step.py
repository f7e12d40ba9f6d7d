"""The step that runs the agents: its end, signals, requeues. Real jobs: tests/cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from captured import captured
from job_tools import make_tool

from launcher.agent.control import Control, Done, Membership, report_outcome, tell
from launcher.failure import Failure
from launcher.failure_block import Outcome, print_outcome
from launcher.fanout import step
from launcher.plan.plan import Plan
from launcher.wire import limits

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys
from pathlib import Path
sys.path += [sys.argv[1] + "/tests/unit", sys.argv[1]]
from job_tools import job_plan
from launcher.fanout import step
sys.exit(step.run_step(job_plan(Path.cwd(), min_nodes=int(sys.argv[2])), ["srun"]))
"""


def told(node_rank: int, blamed: int, capsys: pytest.CaptureFixture[str], frames: int = 0) -> str:
    """Return the lines in which a node's agent tells that it has lost another."""
    lost = [f"my_task.py:{line} in loss" for line in range(frames)]
    failure = Failure(
        "link-lost", "no sign of life", 137, f"node{blamed + 1}", blamed, 9.0, frames=lost
    )
    report_outcome(
        Outcome(137, failure, stopped=1), Control(None, f"t0ken {node_rank}"), is_line_open=False
    )
    return capsys.readouterr().out


def run_step(folder: Path, min_nodes: int = 0) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a step to its end; returns what came of it, and how long it took."""
    began = time.monotonic()
    environ = {**os.environ, "LAUNCH_TOKEN": "t0ken"}
    command = [sys.executable, "-c", RUN, str(ROOT), str(min_nodes)]
    result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    return result, time.monotonic() - began


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_srun_that_waits_for_a_lost_node_is_ended(
    tmp_path: Path, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "told").write_text(told(0, 1, capsys))
    make_tool(tools / "srun", "echo step 1; cat told; exec sleep 60")
    result, took_s = run_step(tmp_path)
    assert result.returncode == 137
    assert result.stdout == "step 1\n"
    assert result.stderr.startswith("FAILED   node agent 1 (node2) ")
    assert limits.SRUN_END_S <= took_s < limits.SRUN_END_S + 30  # srun takes 60


@pytest.mark.slow
def test_a_run_that_goes_on_without_a_node_ends_as_the_others_do(
    tmp_path: Path, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, others = told(1, 1, capsys), Control(None, "t0ken 0")
    tell(Membership(1, [0, 2]), others, is_line_open=False)
    membership = capsys.readouterr().out
    for rank in (0, 2):
        told_last = Done() if rank else Outcome(0)
        tell(told_last, Control(None, f"t0ken {rank}"), is_line_open=False)
    begun = "".join(f"t0ken {rank}\n" for rank in range(3))
    pause = f"sleep {limits.SRUN_END_S + 1}"
    for name, text in (("lost", begun + lost), ("ends", membership + capsys.readouterr().out)):
        (tmp_path / name).write_text(text)
    make_tool(tools / "srun", f"cat lost; {pause}; echo on; cat ends; exit 137")
    result, _ = run_step(tmp_path, min_nodes=2)
    assert (result.returncode, result.stdout, result.stderr) == (0, "on\n", "")


def test_the_block_comes_once_and_last_and_node_rank_0_is_believed(
    tmp_path: Path, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        told(node, 1 - node, capsys, frames=99).splitlines(keepends=True) for node in (0, 1)
    )
    assert len(first) > 2 and max(map(len, first)) < 1024
    mixed = "".join(one + other for one, other in zip(second, first, strict=True))
    (tmp_path / "told").write_text(f"step 1\n{mixed}no end")
    make_tool(tools / "srun", "cat told; echo srun: error: node1 >&2; exit 1")
    result, _ = run_step(tmp_path)
    assert result.returncode == 137
    assert result.stdout == "step 1\nno end"
    assert result.stderr.startswith("srun: error: node1\n\nFAILED   node agent 1 (node2) ")
    assert result.stderr.count("FAILED") == 1
    assert result.stderr.endswith("see      TROUBLESHOOTING.md#link-lost\n")


def test_a_node_that_failed_is_told_where_node_rank_0_was_only_stopped(
    tmp_path: Path, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = Outcome(143, stopped=1, signum=15)
    report_outcome(stopped, Control(None, "t0ken 0"), is_line_open=False)
    (tmp_path / "told").write_text(capsys.readouterr().out + told(1, 1, capsys))
    make_tool(tools / "srun", "cat told; exit 143")
    result, _ = run_step(tmp_path)
    assert result.returncode == 137
    assert result.stderr.startswith("FAILED   node agent 1 (node2) ")


def test_an_agent_that_was_killed_is_named_where_the_others_were_only_stopped(
    tmp_path: Path, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = Outcome(143, stopped=1, signum=15)
    for rank in (0, 2):
        report_outcome(stopped, Control(None, f"t0ken {rank}"), is_line_open=False)
    (tmp_path / "told").write_text("t0ken 1\n" + capsys.readouterr().out)
    make_tool(tools / "srun", "cat told; exit 143")
    result, _ = run_step(tmp_path)
    assert result.returncode == 137
    assert result.stderr.startswith("FAILED   node agent 1 (node2) ")
    assert "[agent-killed]\ncause    SIGKILL to the node agent, from outside" in result.stderr


def test_without_a_word_of_the_agents_sruns_code_counts(tmp_path: Path, tools: Path) -> None:
    make_tool(tools / "srun", "echo t0ken 0 no message; echo t0ken x; exit 7")
    result, _ = run_step(tmp_path)
    assert (result.returncode, result.stderr) == (7, "")


@pytest.mark.parametrize(
    ("reason", "code", "signum", "environment", "expected"),
    [  # squeue's reason, the code and the signal of the end that was told, the fault and the code
        ("TimeLimit", 143, signal.SIGTERM, "requeued-batch-step", ("time-limit", 143)),
        ("TimeLimit", 1, signal.SIGTERM, "requeued-batch-step", ("time-limit", 143)),
        ("TimeLimit", 138, signal.SIGUSR1, "requeued-batch-step", ("time-limit", 143)),
        ("TimeLimit", 143, signal.SIGTERM, "salloc-command", ("time-limit", 143)),
        ("TimeLimit", 75, signal.SIGTERM, "requeued-batch-step", (None, 75)),
        ("TimeLimit", 0, 0, "requeued-batch-step", (None, 0)),
        ("None", 1, signal.SIGTERM, "requeued-batch-step", (None, 143)),
        ("None", 1, signal.SIGTERM, "salloc-command", (None, 1)),
        ("None", 138, signal.SIGUSR1, "requeued-batch-step", (None, 138)),
    ],
)
def test_an_end_at_the_time_limit_has_its_name(
    reason: str,
    code: int,
    signum: int,
    environment: str,
    expected: tuple[str | None, int],
    tools: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_tool(tools / "squeue", f"echo {reason}")
    for name, value in captured(environment, PATH=os.environ["PATH"]).items():
        monkeypatch.setenv(name, value)
    end = step.as_slurm_ended(Outcome(code, ends="by a signal", signum=signum))
    assert (end.failure and end.failure.fault, end.code) == expected
    print_outcome(end, sys.stdout, None)
    shown = capsys.readouterr().out
    assert shown.startswith("FAILED   job (") == (end.failure is not None)


# --- requeues -----------------------------------------------------------------------------------


def test_three_restarts_without_a_new_step_end_the_job(
    plan: Plan, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queued = plan.directory / "queued"
    make_tool(tools / "scontrol", f'echo "$*" >>"{queued}"')
    latest = plan.directory / "checkpoints/mine/latest"
    latest.parent.mkdir(parents=True)
    job, task = captured("requeued-batch-step"), captured("array-batch-step")
    for number, environ in [(5, job), (5, job), *[(9, task)] * 5]:
        latest.unlink(missing_ok=True)
        latest.symlink_to(f"step-{number}")
        assert step.requeue(plan, environ)
    assert queued.read_text().splitlines() == ["requeue 11"] * 2 + ["requeue 5_5"] * 3
    told = "x.sh: 3 restarts made no progress; the job is not requeued\n"
    back = [
        f"requeued job {name}; it resumes when SLURM starts it again\n" for name in ("11", "5_5")
    ]
    assert capsys.readouterr().err == 2 * back[0] + 3 * back[1] + told * 2


def test_a_requeue_that_slurm_refuses_is_not_announced(
    plan: Plan, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tool(tools / "scontrol", "exit 1")
    assert not step.requeue(plan, captured("salloc-command"))
    assert capsys.readouterr().err == ""


# --- signals ------------------------------------------------------------------------------------


def test_a_notice_before_its_tasks_have_started_reaches_them(tmp_path: Path, tools: Path) -> None:
    notice = tmp_path / "logs/mine/notice"
    notice.parent.mkdir(parents=True)
    notice.touch()  # of an earlier start
    checks = f'[[ -e "{notice}" ]] && exit 1; kill -USR1 $PPID; trap "exit 2" USR1'
    waits = f'until [[ -e "{notice}" ]]; do sleep 0.01; done; exit 75'
    make_tool(tools / "srun", f"{checks}; {waits}")
    make_tool(tools / "scontrol", 'echo "$*" >>queued')
    result, _ = run_step(tmp_path)
    assert result.returncode == 75
    assert (tmp_path / "queued").read_text().startswith("requeue ")


def test_a_notice_that_no_file_can_tell_is_sent_by_srun(plan: Plan) -> None:
    plan.folder.parent.mkdir(parents=True)
    plan.folder.write_text("in its place")
    with subprocess.Popen(["sleep", "600"]) as srun:
        step.pass_on(signal.SIGUSR1, plan, srun)
        assert srun.wait() == -signal.SIGUSR1


@pytest.mark.parametrize(
    ("squeue", "cancelled", "expected"),
    [  # what squeue does, the steps that scancel gets, the signal that srun gets
        (
            "printf '7.0 other\\n7.1 mine\\n7.batch batch\\n7.2 mine too\\n'",
            "--quiet --signal=TERM 7.1",
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
        step.stop_step("mine", sleeper)
        if not expected:
            sleeper.kill()
        code = sleeper.wait()
    assert -code == (signal.Signals[expected] if expected else signal.SIGKILL)
    asked = tools / "cancelled"
    assert (asked.read_text().strip() if asked.exists() else "") == cancelled
