"""The srun fan-out: commands, and nodes that do not answer. tests/cluster runs real jobs."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from agents import ROOT, run_program
from captured import captured
from job_tools import make_tool

from distributed import hostlist
from launcher import importable
from launcher.agent.control import Control
from launcher.failure import Failure
from launcher.failure_block import print_outcome
from launcher.fanout import launch_end, requeue, steps
from launcher.fanout.loop import Child
from launcher.outcome import Outcome
from launcher.plan.plan import Plan
from launcher.text import PlanError
from launcher.wire import limits, messages
from launcher.wire.messages import Exit, Fault, Membership, Report, Request, Start, StopRequest

# --- commands -----------------------------------------------------------------------------------


def test_agents_get_all_that_the_job_has_and_the_variables_of_the_run(plan: Plan) -> None:
    own = {"SLURM_JOB_CPUS_PER_NODE": "64,32(x2)", "CUDA_VISIBLE_DEVICES": "0,1"}
    environ = captured("batch-step", **own)
    command = steps.step_command(replace(plan, environ=environ), nproc=2, port=1234)
    step, agent = command.index("srun"), command.index("env", 1)
    environ["SRUN_OPTS"] = "--network=x --auto-resume=1"
    command = steps.step_command(replace(plan, environ=environ), nproc=2, port=1234)
    assert command[step + 1 : agent + 2][-3:] == [
        *("--network=x", "--auto-resume=1", "--kill-on-bad-exit=1")
    ]
    command = steps.step_command(
        replace(plan, environ=captured("batch-step", **own)), nproc=2, port=1234
    )
    sizes = ("GPUS_PER_TASK", "NTASKS_PER_GPU", "CPUS_PER_GPU", "TRES_PER_TASK")
    binds = ("GPU_BIND", "TRES_BIND", "CPU_BIND")
    memory = ("MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE")
    unset = [f"--unset=SLURM_{name}" for name in (*sizes, *binds, *memory, "LABELIO")]
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
        assert word in steps.step_command(named, nproc=2, port=1234)
        assert word not in steps.step_command(usual, nproc=2, port=1234)


def test_a_step_with_spares_outlives_a_node(plan: Plan) -> None:
    environ = captured("batch-step")
    plan = replace(plan, num_nodes=2, num_spares=1, min_nodes=2, environ=environ)
    command = steps.step_command(plan, nproc=2, port=1234)
    assert {"--nodes=3", "--ntasks=3", "--kill-on-bad-exit=0", "--no-kill"} <= {*command}
    assert "--wait=0" in command  # otherwise a site's WaitTime ends the step
    assert {"SPARES=1", "MIN_NODES=2"} <= {*command}
    plan = Plan(**{**vars(plan), "left_out": ["node2", "node9"]})
    command = steps.step_command(plan, nproc=2, port=1234)
    assert "--exclude=node2,node9" in command


@pytest.mark.parametrize(
    ("given", "forwarded"),
    [
        (None, None),
        ("ALL", None),
        ("ALL,MINE=1", None),
        ("NONE", "PATH,HOME,LAUNCH_TOKEN,RUN_SECRET"),
        ("NIL", "PATH,HOME,LAUNCH_TOKEN,RUN_SECRET"),
        ("MINE=1,OTHER", "MINE=1,OTHER,PATH,HOME,LAUNCH_TOKEN,RUN_SECRET"),
    ],
)
def test_srun_forwards_the_secret_whatever_sbatch_exports(
    plan: Plan, given: str | None, forwarded: str | None
) -> None:
    plan = replace(plan, environ={} if given is None else {"SLURM_EXPORT_ENV": given})
    first, second = (steps.agent_variables(plan) for _ in range(2))
    assert first.get("SLURM_EXPORT_ENV") == forwarded
    assert len(bytes.fromhex(first["RUN_SECRET"])) == 32
    assert first["RUN_SECRET"] != second["RUN_SECRET"]


def test_one_task_for_each_rank(plan: Plan) -> None:
    plan = Plan(**{**vars(plan), "engine": "srun"})
    sizes = {"SLURM_GPUS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "4"}
    environ = captured("batch-step", PYTHONPATH="/mine", **sizes)
    command = steps.step_command(replace(plan, environ=environ), nproc=2, port=1234)
    assert command[:3] == ["env", "SLURM_GPUS_PER_NODE=2", "srun"]
    assert {"--kill-on-bad-exit=1", "--job-name=mine", "--cpus-per-task=4"} <= {*command}
    assert "--unset=SLURM_CPU_BIND" not in command
    shell = {**environ, "SLURM_CPU_BIND_LIST": "0x1"}  # the job was submitted from an srun shell
    bound = steps.step_command(replace(plan, environ=shell), nproc=2, port=1234)
    assert bound == ["env", "--unset=SLURM_CPU_BIND", *command]
    path = "PYTHONPATH=/mine:" + importable.__path__[0]
    assert command[-6:] == ["OMP_NUM_THREADS=1", path, "/python", "-u", "own.py", "a b"]
    with pytest.raises(PlanError, match=r"needs 4 tasks per node.* has 2\(x2\); .*-world\]$"):
        steps.step_command(replace(plan, environ=environ), nproc=4, port=1234)
    del environ["SLURM_NTASKS"]  # then SLURM_TASKS_PER_NODE counts CPUs, not tasks
    with pytest.raises(PlanError, match=r"needs 2 tasks per node.* has 1; .*-world\]$"):
        steps.step_command(replace(plan, environ=environ), nproc=2, port=1234)


# --- a step, played by a script -----------------------------------------------------------------

# What srun's tasks do: they say hello, and answer the requests that they get on stdin.
TASKS = r"""
say() { printf '\002%s.%s %s\n' "$LAUNCH_TOKEN" "$@"; }
all() { local rank; for rank in $RANKS; do say "$rank" "$1"; done; }
hear() { read -r line && printf '%s\n' "$line" >>heard; }
hello() { all '{"Hello":{"address":""}}'; }
report() { for rank in $RANKS; do say "$rank" "$(<"report.$rank")"; done; }
begin() { hello && hear && report && hear; }
end() { all '{"Exit":{"code":0,"left":0}}'; }
printf '%s\n' "$*" >>asked
RANKS="0 1 2"
"""
RUN = """
import sys
from pathlib import Path
sys.path += [sys.argv[1] + "/tests/unit", sys.argv[1]]
from job_tools import job_plan
from launcher.fanout import srun
from launcher.text import warn
from launcher.wire import limits
from distributed.errors import Refused
exec(sys.argv[3])
plan = job_plan(Path.cwd(), **eval(sys.argv[2]))
sys.exit(srun.SrunFanout(plan).run(lambda: None))
"""


def report(node_rank: int, *faults: Fault) -> str:
    found = Report(
        node_rank, 3, 1, f"node{node_rank + 1}", "mine", {}, {}, port=1234, faults=faults
    )
    return messages.write(found)


def launch(
    folder: Path,
    tools: Path,
    tasks: str,
    *,
    reports: Sequence[str] = (report(0), report(1), report(2)),
    before: str = "",
    plan: str = "{}",
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Launch a run whose step is played by a script. `before` is code, `plan` changes of it."""
    make_tool(tools / "srun", TASKS + tasks)
    for rank, text in enumerate(reports):
        (folder / f"report.{rank}").write_text(text)
    command = [sys.executable, "-c", RUN, ROOT, plan, before]
    return run_program(command, folder, **environ)


def say(node_rank: int, *sent: object) -> str:
    """Return lines of a script in which a node sends its launcher some messages."""
    lines = [f"say {node_rank} {shlex.quote(messages.write(message))}" for message in sent]
    return "\n".join(lines) + "\n"


def lost(blamed: int, frames: int = 0) -> Outcome:
    """Return the outcome sent by an agent that has lost another."""
    places = [f"my_task.py:{line} in loss" for line in range(frames)]
    failure = Failure(
        "link-lost", "no sign of life", 137, f"node{blamed + 1}", blamed, 9.0, frames=places
    )
    return Outcome(137, failure, stopped=1)


# --- the preflight ------------------------------------------------------------------------------


def test_one_step_checks_the_nodes_and_runs_the_agents(tmp_path: Path, tools: Path) -> None:
    result = launch(tmp_path, tools, "begin\nend")
    assert result.returncode == 0, result.stderr
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert " --input=all --wait=0 --kill-on-bad-exit=1 env " in asked
    assert "launcher.fanout.far_side --step --rdzv-id mine own.py" in asked
    request, start = map(messages.read, (tmp_path / "heard").read_text().splitlines())
    assert isinstance(request, Request) and isinstance(start, Start)
    assert request.meeting_size == 3 and "--node-rank" not in start.command
    assert start.variables["RUN_ID"] == "mine"


TASK_2_ENDED = "echo 'srun: error: node3: task 2: Exited with exit code 127' >&2"


@pytest.mark.parametrize(
    ("ranks", "end", "before", "cause"),
    [
        (
            *("2", "exit 1", ""),
            "node1: no answer to the preflight (srun's exit code is 1, see above); try srun "
            "--nodelist=node1,node2 hostname [node-missing]",
        ),
        (
            *("0 1", "exec sleep 600", "limits.STEP_NAMING_S, limits.STEP_PREFLIGHT_S = 0.5, 2"),
            "node3: no answer to the preflight (srun's exit code is 143, see above); try srun "
            "--nodelist=node3 hostname [node-missing]",
        ),
        (
            *("0 1", f"{TASK_2_ENDED}\nexit 143", ""),  # srun ends the others
            "node3: the preflight did not start, see above; make ",
        ),
    ],
)
def test_a_node_that_does_not_answer_is_named(
    tmp_path: Path, tools: Path, ranks: str, end: str, before: str, cause: str
) -> None:
    make_tool(tools / "squeue", "echo 7 RUNNING")
    result = launch(tmp_path, tools, f"RANKS='{ranks}'\nhello\n{end}", before=before)
    assert result.returncode == 3
    assert f"x.sh: {cause}" in result.stderr


def test_a_node_that_keeps_the_others_waiting_is_named_meanwhile(
    tmp_path: Path, tools: Path
) -> None:
    early = "RANKS=0 hello\nuntil [[ -e warned ]]; do sleep 0.1; done\n"
    note = "warned = srun.SrunFanout.say\n"
    note += "def say(self, text):\n    warned(self, text)\n    Path('warned').touch()\n"
    note += "srun.SrunFanout.say = say\nlimits.STEP_NAMING_S = 1.0"
    result = launch(tmp_path, tools, f"{early}begin\nend", before=note)
    assert result.returncode == 0
    assert result.stderr.startswith(
        "x.sh: warning: no answer to the preflight from node2, node3 for 1 s; waiting"
        " [node-missing]\n"
    )


def test_a_node_that_no_spare_can_replace_is_refused(tmp_path: Path, tools: Path) -> None:
    tasks = "RANKS='1 2'\nhello\nexit 1"
    plan = "dict(num_nodes=2, num_spares=1, min_nodes=2)"
    result = launch(tmp_path, tools, tasks, plan=plan, MASTER_ADDR="node1")
    assert result.returncode == 3
    assert "x.sh: node1: no answer to the preflight " in result.stderr
    assert len((tmp_path / "asked").read_text().splitlines()) == 1


def test_a_spare_replaces_a_node_in_another_step(tmp_path: Path, tools: Path) -> None:
    """The far sides of the first step end as soon as its stdin ends."""
    ill = report(1, Fault("gpu-busy", "why", "cure"))
    tasks = "[[ ! -e heard ]] || { RANKS='0 1'; cp report.0 report.1; }\nbegin || exit 0\nend"
    plan = "dict(num_nodes=2, num_spares=1, min_nodes=2)"
    result = launch(tmp_path, tools, tasks, reports=[report(0), ill, report(2)], plan=plan)
    assert result.returncode == 0, result.stderr
    assert "x.sh: node3 replaces node2\n" in result.stderr
    first, second = (tmp_path / "asked").read_text().splitlines()
    assert "--exclude=node2" in second and "--exclude" not in first


@pytest.mark.parametrize(("mode", "is_back"), [("REQUEUE", True), ("CANCEL", False)])
def test_a_preemption_that_ends_the_preflight_requeues_the_job_if_slurm_would(
    mode: str, is_back: bool, tmp_path: Path, tools: Path
) -> None:
    queued = tools / "queued"
    record = f"JobId=7 JobState=RUNNING QOS=N/A PreemptTime=now Partition=low PreemptMode={mode}"
    make_tool(tools / "scontrol", f'[[ $1 == requeue ]] && echo "$*" >"{queued}" || echo {record}')
    result = launch(tmp_path, tools, "exit 143", **captured("requeued-batch-step"))
    assert result.returncode == 143 and queued.exists() == is_back
    told = result.stderr
    assert told.endswith("stopped  by SIGTERM; nothing was started\n")
    assert told.startswith("requeued job 11; ") == is_back


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_srun_that_waits_for_a_lost_node_is_ended(tmp_path: Path, tools: Path) -> None:
    ends = say(0, lost(1), Exit(137, 0)) + say(2, Exit(137, 0))
    plan = "dict(silence_s=6.0)"
    beats = "for beat in 1 2 3 4 5 6 7 8 9; do sleep 1; say 0 ''; say 2 ''; done\n"
    began = time.monotonic()
    tasks = f"begin\necho step 1\n{beats}{ends}exec sleep 600"
    result = launch(tmp_path, tools, tasks, plan=plan)
    assert result.returncode == 137
    assert result.stdout == "step 1\n"
    assert "x.sh: node2: no heartbeat for 6 s (network down?) [link-lost]\n" in result.stderr
    assert "\nFAILED   node agent 1 (node2) " in result.stderr
    assert limits.SRUN_END_S <= time.monotonic() - began < 300  # srun would take 600 s


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 75])
def test_a_run_whose_nodes_take_long_to_exit_ends_as_node_rank_0_says(
    tmp_path: Path, tools: Path, code: int
) -> None:
    ends = say(0, Outcome(code), Exit(code, 0))
    tasks = f"begin\n{ends}exec sleep 60"  # as while memory is being freed
    result = launch(tmp_path, tools, tasks, before="limits.CONTROL_END_S = 2.0")
    assert result.returncode == code and "FAILED" not in result.stderr


@pytest.mark.slow
def test_a_run_that_goes_on_without_a_node_ends_as_the_others_do(
    tmp_path: Path, tools: Path
) -> None:
    first = say(1, lost(1), Exit(137, 0))
    last = say(0, Membership(1, [0, 2]), Outcome(0), Exit(0, 0)) + say(2, Exit(0, 0))
    pause = f"sleep {limits.SRUN_END_S + 1}"
    tasks = f"begin\n{first}{pause}\necho on\n{last}exit 137"
    result = launch(tmp_path, tools, tasks, plan="dict(min_nodes=2)")
    assert (result.returncode, result.stdout) == (0, "on\n")
    assert "FAILED" not in result.stderr and "x.sh: continuing without node2\n" in result.stderr


def test_the_block_comes_once_and_last_and_node_rank_0_is_believed(
    tmp_path: Path, tools: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """srun mixes the lines of its nodes."""

    def pieces(node: int) -> list[str]:
        Control(1, f"t0ken.{node}", is_step=True).send(lost(1 - node, frames=99))
        return capfd.readouterr().out.splitlines(keepends=True)

    first, second = pieces(0), pieces(1)
    assert len(first) > 2 and max(map(len, first)) < 1024
    mixed = "".join(one + other for one, other in zip(second, first, strict=True))
    (tmp_path / "told").write_text(f"step 1\n{mixed}no end")
    tasks = 'begin\nsed "s/t0ken/$LAUNCH_TOKEN/" told\necho srun: error: node1 >&2; exit 1'
    result = launch(tmp_path, tools, tasks)
    assert result.returncode == 137
    assert result.stdout.startswith("step 1\nno end")
    assert result.stderr.count("FAILED") == 1
    assert "\nFAILED   node agent 1 (node2) " in result.stderr
    assert result.stderr.endswith("see      TROUBLESHOOTING.md#link-lost\n")


def test_a_node_that_failed_is_told_where_node_rank_0_was_only_stopped(
    tmp_path: Path, tools: Path
) -> None:
    stopped = say(0, Outcome(143, stopped=1, signum=15), Exit(143, 0))
    failed = say(1, lost(1), Exit(137, 0))
    result = launch(tmp_path, tools, f"begin\n{stopped}{failed}exit 143")
    assert result.returncode == 137
    assert "\nFAILED   node agent 1 (node2) " in result.stderr


def test_without_a_word_of_the_agents_sruns_code_counts(tmp_path: Path, tools: Path) -> None:
    junk = "say 0 'no message'\nprintf '\\002%s.x\\n' $LAUNCH_TOKEN\nexit 7"
    result = launch(tmp_path, tools, f"begin\n{junk}")
    assert result.returncode == 7 and "FAILED" not in result.stderr


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
        assert requeue.requeue_after_notice(replace(plan, environ=environ))
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
    assert requeue.requeue_after_notice(replace(plan, environ=captured("requeued-batch-step")))
    assert (tools / "queued").read_text() == "requeue 11\n"


def test_a_requeue_that_slurm_refuses_is_not_announced(
    plan: Plan, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tool(tools / "scontrol", "exit 1")
    assert not requeue.requeue_after_notice(replace(plan, environ=captured("salloc-command")))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_job_that_is_cancelled_after_a_notice_is_not_requeued(
    state: str, plan: Plan, tools: Path
) -> None:
    queued = plan.directory / "queued"
    make_tool(tools / "squeue", f"echo 11 {state}")
    shown = f"JobId=11 JobState={state}"
    make_tool(tools / "scontrol", f'[[ $1 == show ]] && echo {shown} || echo "$*" >"{queued}"')
    is_back = requeue.requeue_after_notice(
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
    assert requeue.requeue_after_notice(
        replace(plan, environ={"SLURM_JOB_ID": "7"}, checkpoint_dir=None)
    )
    told = capsys.readouterr().err
    assert told.startswith("requeued job 7; ")
    cause = f"the notice comes at once, or nearly so, if the time limit is {limit}; "
    assert (f"x.sh: warning: {cause}" in told, told.count("[time-limit]")) == (is_short, is_short)


# --- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_goes_to_the_far_sides_through_the_step(
    tmp_path: Path, tools: Path, signum: signal.Signals
) -> None:
    result = launch(tmp_path, tools, f"begin\nkill -{signum:d} $PPID\nhear\nend")
    assert result.returncode == 0, result.stderr
    *_, stop = (tmp_path / "heard").read_text().splitlines()
    assert messages.read(stop) == StopRequest(signum)


def test_the_stacks_are_asked_of_node_rank_0_alone(tmp_path: Path, tools: Path) -> None:
    result = launch(tmp_path, tools, "begin\nkill -QUIT $PPID\nhear\nend")
    assert result.returncode == 0, result.stderr
    *_, stop = (tmp_path / "heard").read_text().splitlines()
    assert messages.read(stop) == StopRequest(signal.SIGQUIT, node=0)


class Sleeper:
    """Stands in for srun."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "60"])

    def terminate(self, signum: int = signal.SIGTERM) -> None:
        self.process.send_signal(signum)


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
    srun = Sleeper()
    steps.stop_step(plan, cast(Child, srun))
    if not expected:
        srun.process.kill()
    code = srun.process.wait()
    assert -code == (signal.Signals[expected] if expected else signal.SIGKILL)
    asked = tools / "cancelled"
    assert (asked.read_text().strip() if asked.exists() else "") == cancelled
