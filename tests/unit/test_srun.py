"""The srun fan-out: commands, and nodes that do not answer. tests/cluster runs real jobs."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from agents import PATIENCE_S, ROOT, run_program
from captured import captured
from job_tools import make_tool

from distributed import hostlist
from distributed.errors import Refused
from launcher import importable
from launcher.agent.control import Control
from launcher.failure import Failure
from launcher.failure_block import print_outcome
from launcher.fanout import launch_end, srun, step
from launcher.outcome import Outcome
from launcher.plan.plan import Plan
from launcher.preflight.check_node import MARK
from launcher.text import PlanError, warn
from launcher.typed_json import encode
from launcher.wire import limits, messages
from launcher.wire.launcher_link import BEGIN
from launcher.wire.messages import Exit, Fault, Membership, Report

# --- commands -----------------------------------------------------------------------------------


def test_agents_get_all_that_the_job_has_and_the_variables_of_the_run(plan: Plan) -> None:
    own = {"SLURM_JOB_CPUS_PER_NODE": "64,32(x2)", "CUDA_VISIBLE_DEVICES": "0,1"}
    environ = captured("batch-step", **own)
    command = srun.step_command(replace(plan, environ=environ), nproc=2, port=1234)
    step, agent = command.index("srun"), command.index("env", 1)
    environ["SRUN_OPTS"] = "--network=x --auto-resume=1"
    command = srun.step_command(replace(plan, environ=environ), nproc=2, port=1234)
    assert command[step + 1 : agent + 2][-3:] == [
        *("--network=x", "--auto-resume=1", "--kill-on-bad-exit=1")
    ]
    command = srun.step_command(
        replace(plan, environ=captured("batch-step", **own)), nproc=2, port=1234
    )
    sizes = ("GPUS_PER_TASK", "NTASKS_PER_GPU", "CPUS_PER_GPU", "TRES_PER_TASK")
    binds = ("GPU_BIND", "TRES_BIND", "CPU_BIND")
    memory = ("MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE")
    unset = [f"--unset=SLURM_{name}" for name in (*sizes, *binds, *memory)]
    assert command[:step] == ["env", *unset]
    assert command[step + 1 : agent] == [
        *("--nodes=3", f"--chdir={plan.directory}", "--ntasks=3", "--ntasks-per-node=1"),
        "--cpus-per-task=32",
        *("--job-name=mine", "--gpus-per-node=2", "--kill-on-bad-exit=1"),
    ]
    assert command[agent:][:4] == ["env", "RUN_ID=mine", "LAUNCH_COMMAND=x.sh c.yaml", "/python"]
    assert "--node-rank" not in command  # the agent takes it from the step
    assert "CUDA" not in " ".join(command)  # SLURM sets it on each node
    assert command[-2:] == ["own.py", "a b"]


def test_a_master_of_another_name_reaches_the_agents(plan: Plan) -> None:
    plan = replace(plan, environ=captured("batch-step"))
    for engine, word in (("", "--master-addr"), ("srun", "MASTER_ADDR=node1i")):
        named = Plan(**{**vars(plan), "num_nodes": 2, "engine": engine, "master_addr": "node1i"})
        usual = Plan(**{**vars(named), "master_addr": hostlist.first(plan.hosts)})
        assert word in srun.step_command(named, nproc=2, port=1234)
        assert word not in srun.step_command(usual, nproc=2, port=1234)


def test_a_step_with_spares_outlives_a_node(plan: Plan) -> None:
    environ = captured("batch-step")
    plan = replace(plan, num_nodes=2, num_spares=1, min_nodes=2, environ=environ)
    command = srun.step_command(plan, nproc=2, port=1234)
    assert {"--nodes=3", "--ntasks=3", "--kill-on-bad-exit=0", "--no-kill"} <= {*command}
    assert "--wait=0" in command  # otherwise a site's WaitTime ends the step
    assert {"SPARES=1", "MIN_NODES=2"} <= {*command}
    plan = Plan(**{**vars(plan), "left_out": ["node2", "node9"]})
    command = srun.step_command(plan, nproc=2, port=1234)
    assert "--exclude=node2,node9" in command


@pytest.mark.parametrize(
    ("given", "forwarded"),
    [
        (None, None),
        ("ALL", None),
        ("ALL,MINE=1", None),
        ("NONE", "PATH,HOME,RUN_SECRET,LAUNCH_START,LAUNCH_TOKEN"),
        ("NIL", "PATH,HOME,RUN_SECRET,LAUNCH_START,LAUNCH_TOKEN"),
        ("MINE=1,OTHER", "MINE=1,OTHER,PATH,HOME,RUN_SECRET,LAUNCH_START,LAUNCH_TOKEN"),
    ],
)
def test_srun_forwards_the_secret_whatever_sbatch_exports(
    plan: Plan, given: str | None, forwarded: str | None
) -> None:
    plan = replace(plan, environ={} if given is None else {"SLURM_EXPORT_ENV": given})
    first, second = (srun.agent_variables(plan) for _ in range(2))
    assert first.get("SLURM_EXPORT_ENV") == forwarded
    assert len(bytes.fromhex(first["RUN_SECRET"])) == 32
    assert first["RUN_SECRET"] != second["RUN_SECRET"]


def test_one_task_for_each_rank(plan: Plan) -> None:
    plan = Plan(**{**vars(plan), "engine": "srun"})
    sizes = {"SLURM_GPUS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "4"}
    environ = captured("batch-step", PYTHONPATH="/mine", **sizes)
    command = srun.step_command(replace(plan, environ=environ), nproc=2, port=1234)
    assert command[:3] == ["env", "SLURM_GPUS_PER_NODE=2", "srun"]
    assert {"--kill-on-bad-exit=1", "--job-name=mine", "--cpus-per-task=4"} <= {*command}
    assert "--unset=SLURM_CPU_BIND" not in command
    shell = {**environ, "SLURM_CPU_BIND_LIST": "0x1"}  # the job was submitted from an srun shell
    bound = srun.step_command(replace(plan, environ=shell), nproc=2, port=1234)
    assert bound == ["env", "--unset=SLURM_CPU_BIND", *command]
    path = "PYTHONPATH=/mine:" + importable.__path__[0]
    assert command[-6:] == ["OMP_NUM_THREADS=1", path, "/python", "-u", "own.py", "a b"]
    with pytest.raises(PlanError, match=r"needs 4 tasks per node.* has 2\(x2\); .*-world\]$"):
        srun.step_command(replace(plan, environ=environ), nproc=4, port=1234)
    del environ["SLURM_NTASKS"]  # then SLURM_TASKS_PER_NODE counts CPUs, not tasks
    with pytest.raises(PlanError, match=r"needs 2 tasks per node.* has 1; .*-world\]$"):
        srun.step_command(replace(plan, environ=environ), nproc=2, port=1234)


# --- the preflight ------------------------------------------------------------------------------


def report(node_rank: int, *met: Fault) -> str:
    found = Report(node_rank, 3, 1, f"node{node_rank + 1}", "mine", {}, {}, port=1234, met=met)
    return f"{BEGIN}{MARK}.{node_rank} {messages.write(found)}"


@pytest.mark.parametrize(
    ("answered", "end", "limit_s", "cause"),
    [
        ([2], "exit 1", PATIENCE_S, "from node1, node2 (srun's exit code is 1, see above)"),
        pytest.param(
            *([0, 1], "exec sleep 600", 10, "from node3 (srun's exit code is 143, see above)"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_node_that_does_not_answer_is_named(
    plan: Plan,
    tools: Path,
    monkeypatch: pytest.MonkeyPatch,
    answered: list[int],
    end: str,
    limit_s: float,
    cause: str,
) -> None:
    monkeypatch.setattr(limits, "STEP_NAMING_S", 0.5)
    monkeypatch.setattr(limits, "STEP_PREFLIGHT_S", limit_s)
    make_tool(tools / "squeue", "echo 7 RUNNING")
    lines = "\n".join(report(node_rank) for node_rank in answered)
    make_tool(tools / "srun", f"cat <<'END'\nof the prolog\n{lines}\nEND\n{end}")
    with pytest.raises(Refused) as raised:
        srun.ask_nodes(plan)
    assert raised.value.fault == "node-missing"
    assert cause in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_node_that_keeps_the_others_waiting_is_named_meanwhile(
    plan: Plan, tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warned = tools / "warned"

    def warn_and_note(line: str) -> None:
        warn(line)
        warned.touch()

    monkeypatch.setattr(srun, "warn", warn_and_note)
    early, late = (f"cat <<'END'\n{report(rank)}\nEND\n" for rank in (0, 1))
    until_warned = f"until [[ -e {warned} ]]; do sleep 0.1; done\n"
    for naming_s, answers in ((1.0, "sleep 5\n" + early), (4.0, early + until_warned)):
        monkeypatch.setattr(limits, "STEP_NAMING_S", naming_s)
        make_tool(tools / "srun", f"{answers}{late}cat <<'END'\n{report(2)}\nEND")
        assert len(srun.ask_nodes(plan)) == 3
        assert warned.exists() == (naming_s == 4.0)
    assert capsys.readouterr().err == (
        "x.sh: warning: no answer to the preflight from node2, node3 for 4 s; waiting"
        " [node-missing]\n"
    )


def test_a_silent_node_that_no_spare_replaces_is_refused(plan: Plan, tools: Path) -> None:
    environ = {**os.environ, "MASTER_ADDR": "node1"}
    plan = replace(plan, num_nodes=2, num_spares=1, min_nodes=2, environ=environ)
    lines = "\n".join(report(node_rank) for node_rank in (1, 2))
    make_tool(tools / "srun", f"cat <<'END'\n{lines}\nEND")
    with pytest.raises(Refused, match=r"from node1, and no spare can take over; .*node-missing"):
        srun.check_nodes(plan)


@pytest.mark.parametrize(("mode", "is_back"), [("REQUEUE", True), ("CANCEL", False)])
def test_a_preemption_that_ends_the_preflight_requeues_the_job_if_slurm_would(
    mode: str, is_back: bool, plan: Plan, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queued = tools / "queued"
    record = f"JobId=7 JobState=RUNNING QOS=N/A PreemptTime=now Partition=low PreemptMode={mode}"
    make_tool(tools / "scontrol", f'[[ $1 == requeue ]] && echo "$*" >"{queued}" || echo {record}')
    make_tool(tools / "srun", "exit 143")
    with pytest.raises(SystemExit) as left:
        srun.ask_nodes(replace(plan, environ=captured("requeued-batch-step", **os.environ)))
    assert left.value.code == 143 and queued.exists() == is_back
    told = capsys.readouterr().err
    assert told.endswith("stopped  by SIGTERM; nothing was started\n")
    assert told.startswith("requeued job 11; ") == is_back


@pytest.mark.parametrize("is_late", [True, False])
def test_a_node_that_found_the_port_closed_is_asked_again(
    plan: Plan, tools: Path, capsys: pytest.CaptureFixture[str], is_late: bool
) -> None:
    """It may have started after node rank 0 had stopped waiting."""
    blocked = report(2, Fault("port-blocked", "why", "cure"))
    again = report(2) if is_late else blocked
    choice = f"[ -e asked ] && echo '{again}' || echo '{blocked}'; touch asked"
    make_tool(tools / "srun", f"echo '{report(0)}\n{report(1)}'; {choice}")
    assert (srun.check_nodes(plan) is not None) == is_late
    told = capsys.readouterr().err
    assert told == ("" if is_late else "x.sh: node3: why; cure [port-blocked]\n")


def test_reports_come_by_node_rank(plan: Plan, tools: Path) -> None:
    lines = "\n".join(report(node_rank) for node_rank in (2, 0, 1))
    make_tool(tools / "srun", f"printf '%s\\0' \"$@\" >asked; cat <<'END'\n{lines}\nEND")
    os.chdir(plan.directory)
    assert [found.node_rank for found in srun.ask_nodes(plan)] == [0, 1, 2]
    *words, module, request = Path("asked").read_text().rstrip("\0").split("\0")
    assert "--wait=0" in words  # otherwise a site's WaitTime ends the step before a late node
    assert module == "launcher.preflight.check_node"
    assert request == encode(plan.request(meeting_size=3))


# --- the step that runs the agents ----------------------------------------------------------------


RUN = """
import sys
from pathlib import Path
sys.path += [sys.argv[1] + "/tests/unit", sys.argv[1]]
from job_tools import job_plan
from launcher.fanout import step
sys.exit(step.run_step(job_plan(Path.cwd(), min_nodes=int(sys.argv[2])), ["srun"]))
"""


def told(node_rank: int, capfd: pytest.CaptureFixture[str], *sent: object) -> str:
    """Return the lines in which a node sends its launcher some messages."""
    for message in sent:
        Control(None, f"t0ken.{node_rank}").send(message)
    return capfd.readouterr().out


def lost(blamed: int, frames: int = 0) -> Outcome:
    """Return the outcome sent by an agent that has lost another."""
    places = [f"my_task.py:{line} in loss" for line in range(frames)]
    failure = Failure(
        "link-lost", "no sign of life", 137, f"node{blamed + 1}", blamed, 9.0, frames=places
    )
    return Outcome(137, failure, stopped=1)


def run_step(folder: Path, min_nodes: int = 0) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a step to its end; returns the result, and how long it took."""
    began = time.monotonic()
    command = [sys.executable, "-c", RUN, ROOT, min_nodes]
    return run_program(command, folder, LAUNCH_TOKEN="t0ken"), time.monotonic() - began


def test_what_nodes_report_changes_nothing_until_it_is_received(
    tmp_path: Path, tools: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "told").write_text(told(1, capfd, Exit(0, 0)))
    srun = subprocess.Popen(["cat", "told"], cwd=tmp_path, stdout=subprocess.PIPE)
    output = step.Output(srun, "t0ken")
    output._thread.join()
    assert (output.begun, output.exits) == (set(), {})  # may be in use
    output.receive()
    assert (output.begun, output.exits) == ({1}, {1: 0})


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_srun_that_waits_for_a_lost_node_is_ended(
    tmp_path: Path, tools: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "told").write_text(told(0, capfd, lost(1)))
    make_tool(tools / "srun", "echo step 1; cat told; exec sleep 600")
    result, took_s = run_step(tmp_path)
    assert result.returncode == 137
    assert result.stdout == "step 1\n"
    assert result.stderr.startswith("FAILED   node agent 1 (node2) ")
    assert limits.SRUN_END_S <= took_s < 300  # srun would take 600 s


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 75])
def test_a_run_whose_nodes_take_long_to_exit_ends_as_node_rank_0_says(
    tmp_path: Path, tools: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    begun = "".join(f"{BEGIN}t0ken.{rank} \n" for rank in range(2))
    (tmp_path / "told").write_text(begun + told(0, capfd, Outcome(code)))
    make_tool(tools / "srun", "cat told; exec sleep 60")  # as while memory is being freed
    result, _ = run_step(tmp_path)
    assert result.returncode == code and "FAILED" not in result.stderr


@pytest.mark.slow
def test_a_run_that_goes_on_without_a_node_ends_as_the_others_do(
    tmp_path: Path, tools: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = "".join(f"{BEGIN}t0ken.{rank} \n" for rank in range(3)) + told(1, capfd, lost(1))
    last = told(0, capfd, Membership(1, [0, 2]), Outcome(0), Exit(0, 0)) + told(
        2, capfd, Exit(0, 0)
    )
    pause = f"sleep {limits.SRUN_END_S + 1}"
    for name, text in (("lost", first), ("ends", last)):
        (tmp_path / name).write_text(text)
    make_tool(tools / "srun", f"cat lost; {pause}; echo on; cat ends; exit 137")
    result, _ = run_step(tmp_path, min_nodes=2)
    assert (result.returncode, result.stdout, result.stderr) == (0, "on\n", "")


def test_the_block_comes_once_and_last_and_node_rank_0_is_believed(
    tmp_path: Path, tools: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        told(node, capfd, lost(1 - node, frames=99)).splitlines(keepends=True) for node in (0, 1)
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
    tmp_path: Path, tools: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped = told(0, capfd, Outcome(143, stopped=1, signum=15), Exit(143, 0))
    (tmp_path / "told").write_text(stopped + told(1, capfd, lost(1), Exit(137, 0)))
    make_tool(tools / "srun", "cat told; exit 143")
    result, _ = run_step(tmp_path)
    assert result.returncode == 137
    assert result.stderr.startswith("FAILED   node agent 1 (node2) ")


def test_without_a_word_of_the_agents_sruns_code_counts(tmp_path: Path, tools: Path) -> None:
    make_tool(tools / "srun", r"""printf "\002t0ken.0 no message\n\002t0ken.x\n"; exit 7""")
    result, _ = run_step(tmp_path)
    assert (result.returncode, result.stderr) == (7, "")


@pytest.mark.parametrize(
    ("reason", "code", "signum", "environment", "expected"),
    [  # the reason in the job's record, the reported code and signal, the resulting fault and code
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
    plan: Plan,
    tools: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_tool(tools / "scontrol", f"echo JobId=7 Reason={reason} Dependency=x")
    told = Outcome(code, ends="by a signal", signum=signum)
    end = launch_end.as_slurm_ended(told, replace(plan, environ=captured(environment)))
    assert (end.failure and end.failure.fault, end.code) == expected
    print_outcome(end, sys.stdout, None)
    shown = capsys.readouterr().out
    assert shown.startswith("FAILED   job (") == (end.failure is not None)


# --- requeues -----------------------------------------------------------------------------------


def test_three_restarts_without_a_new_step_end_the_job(
    plan: Plan, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queued = plan.directory / "queued"
    make_tool(tools / "scontrol", f'[[ $1 == show ]] || echo "$*" >>"{queued}"')
    saved = plan.directory / "checkpoints/mine"  # a file system without links has no `latest`
    job, task = captured("requeued-batch-step"), captured("array-batch-step")
    for number, environ in [(5, job), (5, job), *[(9, task)] * 5]:
        (saved / f"step-{number}").mkdir(parents=True, exist_ok=True)
        assert step.requeue_after_notice(replace(plan, environ=environ))
    assert queued.read_text().splitlines() == ["requeue 11"] * 2 + ["requeue 5_5"] * 3
    told = "x.sh: 3 restarts made no progress; not requeuing the job\n"
    back = [
        f"requeued job {name}; it resumes when SLURM starts it again\n" for name in ("11", "5_5")
    ]
    assert capsys.readouterr().err == 2 * back[0] + 3 * back[1] + told * 2


def test_a_job_whose_logs_cannot_be_written_is_requeued(plan: Plan, tools: Path) -> None:
    make_tool(tools / "scontrol", f'[[ $1 == show ]] || echo "$*" >"{tools}/queued"')
    plan.folder.parent.mkdir(parents=True)
    plan.folder.touch()  # as if the disk were full: nothing can be written in this folder
    assert step.requeue_after_notice(replace(plan, environ=captured("requeued-batch-step")))
    assert (tools / "queued").read_text() == "requeue 11\n"


def test_a_requeue_that_slurm_refuses_is_not_announced(
    plan: Plan, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tool(tools / "scontrol", "exit 1")
    assert not step.requeue_after_notice(replace(plan, environ=captured("salloc-command")))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_job_that_is_cancelled_after_a_notice_is_not_requeued(
    state: str, plan: Plan, tools: Path
) -> None:
    queued = plan.directory / "queued"
    make_tool(tools / "squeue", f"echo 11 {state}")
    shown = f"JobId=11 JobState={state}"
    make_tool(tools / "scontrol", f'[[ $1 == show ]] && echo {shown} || echo "$*" >"{queued}"')
    is_back = step.requeue_after_notice(
        replace(plan, environ=captured("requeued-batch-step", **os.environ))
    )
    assert is_back == queued.exists() == (state == "RUNNING")


@pytest.mark.parametrize(("limit", "is_short"), [("00:02:00", True), ("00:30:00", False)])
def test_a_limit_that_is_shorter_than_the_notice_is_named(
    limit: str, is_short: bool, plan: Plan, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tool(
        tools / "scontrol", f'[[ $* != "show -o job 7" ]] || echo "JobId=7 TimeLimit={limit}"'
    )
    assert step.requeue_after_notice(
        replace(plan, environ={"SLURM_JOB_ID": "7"}, checkpoint_dir=None)
    )
    told = capsys.readouterr().err
    assert told.startswith("requeued job 7; ")
    cause = f"the notice comes at once, or nearly so, if the time limit is {limit}; "
    assert (f"x.sh: warning: {cause}" in told, told.count("[time-limit]")) == (is_short, is_short)


# --- signals ------------------------------------------------------------------------------------


def test_a_notice_that_no_file_can_tell_is_sent_by_srun(plan: Plan) -> None:
    plan.folder.parent.mkdir(parents=True)
    plan.folder.write_text("in its place")
    with subprocess.Popen(["sleep", "600"]) as srun:
        step.forward_signal(signal.SIGUSR1, plan, srun)
        assert srun.wait() == -signal.SIGUSR1


@pytest.mark.parametrize(
    ("squeue", "cancelled", "expected"),
    [  # squeue's behaviour, the steps given to scancel, the signal sent to srun
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
    plan: Plan, tools: Path, squeue: str, cancelled: str, expected: str
) -> None:
    make_tool(tools / "squeue", squeue)
    make_tool(tools / "scancel", f'echo "$*" >"{tools}/cancelled"')
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        step.stop_step(plan, sleeper)
        if not expected:
            sleeper.kill()
        code = sleeper.wait()
    assert -code == (signal.Signals[expected] if expected else signal.SIGKILL)
    asked = tools / "cancelled"
    assert (asked.read_text().strip() if asked.exists() else "") == cancelled
