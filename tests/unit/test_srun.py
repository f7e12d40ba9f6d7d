"""The srun fan-out: commands, and nodes that do not answer. Real jobs: tests/cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from captured import captured
from job_tools import make_tool

from distributed import hostlist
from distributed.errors import Refused
from launcher import importable
from launcher.fanout import srun
from launcher.plan.plan import Plan
from launcher.preflight.check_node import Report, write_report
from launcher.text import PlanError
from launcher.typed_json import encode
from launcher.wire import limits

# --- commands -----------------------------------------------------------------------------------


def test_agents_get_all_that_the_job_has_and_the_variables_of_the_run(plan: Plan) -> None:
    environ = captured("batch-step", SLURM_JOB_CPUS_PER_NODE="64,32(x2)")
    command = srun.step_command(plan, nproc=2, port=1234, environ=environ)
    names = ("GPUS_PER_TASK", "NTASKS_PER_GPU", "CPUS_PER_GPU")
    unset = [f"--unset=SLURM_{name}" for name in names]
    assert command[:5] == ["env", *unset, "srun"]
    agent = command.index("env", 1)
    assert command[5:agent] == [
        *("--nodes=3", f"--chdir={plan.directory}", "--ntasks=3", "--ntasks-per-node=1"),
        "--cpus-per-task=32",
        *("--job-name=mine", "--gpus-per-node=2", "--kill-on-bad-exit=1"),
    ]
    assert command[agent:][:4] == ["env", "RUN_ID=mine", "LAUNCH_COMMAND=x.sh c.yaml", "/python"]
    assert "--node-rank" not in command  # which the agent takes from the step
    assert command[-2:] == ["own.py", "a b"]


def test_a_master_of_another_name_reaches_the_agents(plan: Plan) -> None:
    environ = captured("batch-step")
    for engine, word in (("", "--master-addr"), ("srun", "MASTER_ADDR=node1i")):
        named = Plan(**{**vars(plan), "num_nodes": 2, "engine": engine, "master_addr": "node1i"})
        usual = Plan(**{**vars(named), "master_addr": hostlist.first(plan.hosts)})
        assert word in srun.step_command(named, nproc=2, port=1234, environ=environ)
        assert word not in srun.step_command(usual, nproc=2, port=1234, environ=environ)


def test_a_step_with_spares_outlives_a_node(plan: Plan) -> None:
    plan = Plan(**{**vars(plan), "num_nodes": 2, "num_spares": 1, "min_nodes": 2})
    command = srun.step_command(plan, nproc=2, port=1234, environ=captured("batch-step"))
    assert {"--nodes=3", "--ntasks=3", "--kill-on-bad-exit=0", "--no-kill"} <= {*command}
    assert {"SPARES=1", "MIN_NODES=2"} <= {*command}
    plan = Plan(**{**vars(plan), "left_out": ["node2", "node9"]})
    command = srun.step_command(plan, nproc=2, port=1234, environ=captured("batch-step"))
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
    given: str | None, forwarded: str | None
) -> None:
    environ = {} if given is None else {"SLURM_EXPORT_ENV": given}
    first, second = (srun.secret_variables(environ, has_agents=True) for _ in range(2))
    assert first.get("SLURM_EXPORT_ENV") == forwarded
    assert len(bytes.fromhex(first["RUN_SECRET"])) == 32
    assert first["RUN_SECRET"] != second["RUN_SECRET"]


def test_one_task_for_each_rank(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    plan = Plan(**{**vars(plan), "engine": "srun"})
    environ = captured("batch-step", SLURM_GPUS_PER_NODE="8", SLURM_CPUS_PER_TASK="4")
    command = srun.step_command(plan, nproc=2, port=1234, environ=environ)
    assert command[:3] == ["env", "SLURM_GPUS_PER_NODE=2", "srun"]
    assert {"--kill-on-bad-exit=1", "--job-name=mine", "--cpus-per-task=4"} <= {*command}
    path = "PYTHONPATH=/mine:" + importable.__path__[0]
    assert command[-6:] == ["OMP_NUM_THREADS=1", path, "/python", "-u", "own.py", "a b"]
    with pytest.raises(PlanError, match=r"2\(x2\) per node, for 4 ranks .*-world\]$"):
        srun.step_command(plan, nproc=4, port=1234, environ=environ)
    del environ["SLURM_NTASKS"]  # the other variable counts the CPUs then
    with pytest.raises(PlanError, match=r"1 per node, for 2 ranks .*-world\]$"):
        srun.step_command(plan, nproc=2, port=1234, environ=environ)


# --- the preflight ------------------------------------------------------------------------------


def report(node_rank: int) -> str:
    found = Report(node_rank, 3, 1, f"node{node_rank + 1}", "mine", {}, {}, port=1234)
    return "\n".join(write_report(found))


@pytest.mark.parametrize(
    ("answered", "end", "fault", "cause"),
    [
        ([0, 2], "exit 127", "env-missing", "did not start on node2, see above; let "),
        ([2], "exit 1", "node-missing", "from node1, node2 (srun's exit code is 1, see above)"),
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
    monkeypatch.setattr(limits, "STEP_NAMING_S", 0.5)
    monkeypatch.setattr(limits, "STEP_PREFLIGHT_S", 1.0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    make_tool(tools / "squeue", "echo 7 RUNNING")
    lines = "\n".join(report(node_rank) for node_rank in answered)
    make_tool(tools / "srun", f"cat <<'END'\nof the prolog\n{lines}\nEND\n{end}")
    with pytest.raises(Refused) as raised:
        srun.ask_nodes(plan)
    assert raised.value.fault == fault
    assert cause in str(raised.value) and "\n" not in str(raised.value)


def test_a_cancelled_job_is_no_missing_node(
    plan: Plan, tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    make_tool(tools / "squeue", "echo 7 COMPLETING")
    make_tool(tools / "srun", "exit 143")  # before the batch script has its own SIGTERM
    with pytest.raises(SystemExit) as left:
        srun.ask_nodes(plan)
    assert left.value.code == 143
    assert capsys.readouterr().err == "stopped  by SIGTERM; nothing was started\n"


@pytest.mark.slow
def test_a_node_that_keeps_the_others_waiting_is_named_meanwhile(
    plan: Plan,
    tools: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(limits, "STEP_NAMING_S", 1.0)
    early, late = (f"cat <<'END'\n{report(rank)}\nEND\n" for rank in (0, 1))
    for answers in ("sleep 2\n" + early, early + "sleep 2\n"):
        make_tool(tools / "srun", f"{answers}{late}cat <<'END'\n{report(2)}\nEND")
        assert len(srun.ask_nodes(plan)) == 3
    assert capsys.readouterr().err == (
        "x.sh: warning: no answer to the preflight from node2, node3 for 1 s; waiting"
        " [node-missing]\n"
    )


def test_a_silent_node_that_no_spare_replaces_is_refused(
    plan: Plan, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(**{**vars(plan), "num_nodes": 2, "num_spares": 1, "min_nodes": 2})
    lines = "\n".join(report(node_rank) for node_rank in (1, 2))
    make_tool(tools / "srun", f"cat <<'END'\n{lines}\nEND")
    monkeypatch.setenv("MASTER_ADDR", "node1")
    with pytest.raises(Refused, match=r"from node1, and no spare can take over; .*node-missing"):
        srun.check_nodes(plan)


def test_reports_come_by_node_rank(plan: Plan, tools: Path) -> None:
    lines = "\n".join(report(node_rank) for node_rank in (2, 0, 1))
    make_tool(tools / "srun", f"printf '%s\\0' \"$@\" >asked; cat <<'END'\n{lines}\nEND")
    os.chdir(plan.directory)
    assert [found.node_rank for found in srun.ask_nodes(plan)] == [0, 1, 2]
    *_, module, request = Path("asked").read_text().rstrip("\0").split("\0")
    assert module == "launcher.preflight.check_node"
    assert request == encode(plan.request(meeting_size=3))
