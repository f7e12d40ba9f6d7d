"""What SLURM and PBS give a launch, from variables that a real SLURM has set; and the commands
that ask them for a job."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from captured import captured
from job_tools import make_tool

from distributed.environment import LauncherError
from distributed.errors import REFUSED, Refused
from distributed.job import ask_scheduler, in_slurm_step
from launcher import start
from launcher.cli.arguments import Call
from launcher.fanout import job_command
from launcher.plan import make_plan, pbs, slurm
from launcher.plan.plan import World
from launcher.text import PlanError

ROOT = Path(__file__).resolve().parents[2]
TWO = World(2, "node1", nproc=2, hosts="node[1-2]")
ONE = World(1, "node1", nproc=None, hosts="node1")


def test_the_master_of_a_job_is_the_address_given() -> None:
    assert slurm.read_job(captured("batch-step", MASTER_ADDR="node1i"), "x.sh", None) == World(
        2, "node1i", nproc=2, hosts="node[1-2]"
    )
    one = captured("requeued-batch-step", MASTER_ADDR="left-over")
    assert slurm.read_job(one, "x.sh", None) == ONE


UNEQUAL = {"SLURM_TASKS_PER_NODE": "2,1", "SLURM_NTASKS": "3"}


@pytest.mark.parametrize(
    ("environ", "asked", "cause"),
    [
        ({}, None, "this is not a SLURM job; use sbatch a/x.sh, or salloc first"),
        (
            {"SLURM_JOB_ID": "7"},
            None,
            "not a SLURM job: SLURM_JOB_ID is set, but not SLURM_JOB_NUM",
        ),
        ({"SLURM_JOB_NUM_NODES": "1"}, None, "_NODES is set, but not SLURM_JOB_ID; use sbatch"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1"},
            None,
            "SLURM_JOB_ID is set, but not SLURM_JOB_NODELIST; use sbatch a/x.sh",
        ),
        (captured("batch-step", SLURM_JOB_NUM_NODES="x"), None, "SLURM_JOB_NUM_NODES is 'x'; give"),
        (
            captured("requeued-batch-step", SLURM_GPUS_ON_NODE="x"),
            None,
            "SLURM_GPUS_ON_NODE is 'x'; give a whole number",
        ),
        (
            captured("batch-step", MASTER_ADDR="localhost"),
            None,
            "MASTER_ADDR is localhost, which the job's other nodes cannot reach; unset it, or",
        ),
        (captured("srun-step"), None, "srun started a/x.sh, which starts srun itself; omit srun"),
        (captured("srun-pty-step"), None, "srun started a/x.sh"),
        (captured("het-batch-step"), None, "a heterogeneous job has nodes that differ"),
        (captured("batch-step", **UNEQUAL), None, "unequal nodes, SLURM_TASKS_PER_NODE=2,1; give"),
        (captured("batch-step"), 4, "4 processes per node, but the job has SLURM_TASKS_PER_NODE=2"),
    ],
)
def test_a_job_that_cannot_be_used(environ: dict[str, str], asked: int | None, cause: str) -> None:
    with pytest.raises(PlanError) as raised:
        slurm.read_job(environ, "a/x.sh", asked)
    assert cause in str(raised.value)
    assert ";" in str(raised.value) and "\n" not in str(raised.value)


NOT_TYPED = {"NUM_NODES": None, "NODE_RANK": None, "MASTER_ADDR": None}


@pytest.mark.parametrize(
    ("name", "typed", "expected"),
    [
        ("one-per-node-step", {}, World(2, "node1", node_rank=1)),
        ("one-per-node-step", {"NODE_RANK": "1", "NUM_NODES": "2"}, World(2, "node1", 1)),
        ("one-per-node-step", {"MASTER_ADDR": "10.0.0.9"}, World(2, "10.0.0.9", 1)),
        ("sub-step", {}, World(1, "node2", node_rank=0)),
        ("one-per-node-step", {"NODE_RANK": "0"}, "NODE_RANK is '0' but srun's SLURM_NODEID is 1"),
        ("one-per-node-step", {"NUM_NODES": "3"}, "'3' but srun's SLURM_STEP_NUM_NODES is 2"),
        ("srun-step", {}, "srun started 4 tasks on 2 nodes; give it --ntasks=2"),
        (
            "sub-step",  # srun --nodes=1 in a job of two
            {"NUM_NODES": "2", "NODE_RANK": "0"},
            "this step has 1 of the job's 2 nodes; start it with srun --nodes=2 --ntasks=2"
            " --ntasks-per-node=1, without node numbers [wrong-world]",
        ),
    ],
)
def test_place_in_a_step(name: str, typed: dict[str, str | None], expected: World | str) -> None:
    assert in_slurm_step(captured(name))
    if isinstance(expected, World):
        assert slurm.read_step(captured(name), {**NOT_TYPED, **typed}) == expected
        return
    with pytest.raises((PlanError, LauncherError)) as raised:
        slurm.read_step(captured(name), {**NOT_TYPED, **typed})
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("batch-step", "the job has 2 nodes and no srun started x.sh on them; "),
        ("salloc-interactive-step", "the job has 2 nodes and no srun started x.sh on them; "),
        ("requeued-batch-step", ""),
        ("sub-step", ""),
        ("one-per-node-step", "this allocation has 2 nodes and x.sh starts one; "),
    ],
)
def test_one_node_of_several_is_refused(name: str, cause: str) -> None:
    if not cause:
        slurm.refuse_many_nodes(captured(name), "x.sh")
        return
    with pytest.raises(PlanError) as raised:
        slurm.refuse_many_nodes(captured(name), "x.sh")
    overlap = "--overlap " if name == "one-per-node-step" else ""  # which has all of the job
    command = f"srun --nodes=2 --ntasks=2 {overlap}scripts/cluster_train.sh CONFIG"
    assert f"{cause}use {command}" in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (
            captured("sub-step", SLURM_JOB_NUM_NODES="2"),
            "this step has 1 of the job's 2 nodes, and",
        ),
        (captured("sub-step", SLURM_JOB_NUM_NODES="1"), ""),
        (captured("requeued-batch-step"), ""),
    ],
)
def test_a_part_of_the_job_is_named(
    environ: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.warn_of_part(environ, "run_ddp.sh")
    assert capsys.readouterr().err.startswith(f"run_ddp.sh: warning: {told}" if told else "")
    if not told:
        assert capsys.readouterr().err == ""


def test_a_login_node_has_a_batch_system_and_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not make_plan.is_login_node({})
    (tmp_path / "qstat").write_text("#!/bin/sh\n")
    (tmp_path / "qstat").chmod(0o755)
    assert make_plan.is_login_node({})
    assert not make_plan.is_login_node({"SLURM_JOB_ID": "5"})
    assert not make_plan.is_login_node({"PBS_JOBID": "5.host"})


KILLED = "a stop can take {0} s (GRACE + 10), but PBS kills this job {1} s after qdel or"
KILLED += " the walltime (kill_delay of queue workq); ask your administrator for kill_delay={0}"
SAVES = ", or set GRACE={0} if the ranks save within {0} s"


@pytest.mark.parametrize(
    ("told", "grace_s", "line"),
    [
        ("    kill_delay = 40", 30, ""),
        ("    kill_delay = 39", 30, KILLED.format(40, 39) + SAVES.format(29)),
        ("    enabled = True", 30, KILLED.format(40, 10)),  # the default
        ("    enabled = True", 0, ""),
        ("    kill_delay = 2", 0, KILLED.format(10, 2)),
        ("    kill_delay = soon", 30, ""),
        (None, 30, ""),
    ],
)
def test_pbs_that_kills_before_the_ranks_have_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, grace_s: int, line: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = f"echo 'Queue: workq\n{told}'" if told else "exit 1"
    make_tool(tmp_path / "qstat", f'[[ "$*" != "-f 7.host" ]] || exec echo "  a = b"; {answer}')
    job = {"PBS_JOBID": "7.host", "PBS_QUEUE": "workq"}
    pbs.ask_qstat.cache_clear()
    assert pbs.find_short_delay(grace_s, job) == line
    assert pbs.find_short_delay(grace_s, {**job, "PBS_JOBID": ""}) == ""
    assert pbs.find_short_delay(grace_s, {"PBS_JOBID": "7.host"}) == ""
    if told == "    enabled = True":
        torque = {**job, "PBS_VERSION": "TORQUE-6.1.2"}
        assert pbs.find_short_delay(grace_s, torque) == KILLED.format(grace_s + 10, 2)


# --- the commands that ask for a job ------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "is_ours", "expected"),
    [
        (captured("batch-step"), True, "sbatch --nodes=2 --ntasks-per-node=2 --gpus-per-node=2 S"),
        (captured("requeued-batch-step"), True, "sbatch --nodes=1 S"),
        (captured("array-batch-step"), True, "sbatch --nodes=1 --ntasks-per-node=2 S"),
        (captured("salloc-command"), True, "salloc --nodes=2 --ntasks-per-node=2 typed.sh"),
        (
            captured("salloc-interactive-step"),
            False,
            "salloc --nodes=2 --ntasks-per-node=2 typed.sh",
        ),
        (captured("salloc-gpus-command"), True, "salloc --nodes=2 --gpus-per-node=2 typed.sh"),
        ({}, True, "sbatch S"),
    ],
)
def test_slurm_command(environ: dict[str, str], is_ours: bool, expected: str) -> None:
    script = "S" if is_ours else None
    command = slurm.job_command(environ, script, ["typed.sh", "c.yaml", "a b"])
    assert shlex.join(command) == f"{expected} c.yaml 'a b'"


@pytest.mark.parametrize("file", ["/home/me/job.sh 5", ""])
def test_the_batch_file_of_a_users_own_is_submitted_again(tools: Path, file: str) -> None:
    make_tool(tools / "squeue", f"echo '{file}'")
    command = slurm.job_command(
        captured("batch-step"), None, ["launch.sh", "--hosts", "job", "x.py"]
    )
    sizes = "sbatch --nodes=2 --ntasks-per-node=2 --gpus-per-node=2"
    assert shlex.join(command) == (f"{sizes} {file}" if file else "")


@pytest.mark.parametrize(
    ("lines", "asked", "num_nodes", "nproc"),
    [
        ("#SBATCH --nodes=3\n#SBATCH --gpus-per-node=4  # each", None, 3, 4),
        ("#SBATCH --nodes=3\n#SBATCH --gpus-per-node=4", 2, 3, 2),
        ("#SBATCH -N 3\n#SBATCH --gres=gpu:a100:8", None, 3, 8),
        ("#SBATCH --nodes=2 --ntasks-per-node=6\n#SBATCH --gres=gpu:8", 2, 2, 6),
        ("#PBS -l select=2:ncpus=8:ngpus=4", None, 2, 4),
        ("#PBS -l nodes=2:ppn=8:gpus=4", None, 2, 4),
        ("#SBATCH --gpus-per-node=4", None, 1, None),
        ("#SBATCH --nodes=2", None, 2, None),
        ("# --nodes=2 --gpus-per-node=2", None, 1, None),
    ],
)
def test_what_a_batch_script_asks_for(
    tmp_path: Path, lines: str, asked: int | None, num_nodes: int, nproc: int | None
) -> None:
    script = tmp_path / "x.sh"
    script.write_text(f"#!/bin/bash\n{lines}\ntrue\n")
    found = job_command.read_script(script, asked)
    assert (found.num_nodes, found.nproc) == (num_nodes, nproc)


@pytest.mark.parametrize(
    ("code", "is_cancelled"),
    [(0, True), (1, True), (2, True), (143, True), (75, False), (137, False)],
)
def test_the_rest_of_a_chain_is_cancelled_unless_it_is_needed(
    tmp_path: Path, tools: Path, code: int, is_cancelled: bool
) -> None:
    make_tool(tools / "scancel", f'echo "$@" >{tmp_path}/told')
    slurm.end_chain(code, {**captured("batch-step"), "CHAIN": "linked"})
    told = tmp_path / "told"
    assert (told.read_text() if told.exists() else "") == (
        "--state=PENDING --name=linked\n" if is_cancelled else ""
    )
    slurm.end_chain(0, {"CHAIN": "linked"})  # no batch script


@pytest.mark.parametrize(("fault", "is_cancelled"), [("run-is-live", False), ("few-cpus", True)])
def test_a_copy_of_a_live_run_leaves_the_chain_of_that_run_alone(
    tmp_path: Path,
    tools: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    is_cancelled: bool,
) -> None:
    def refuse(*_: object) -> None:
        raise Refused(fault, "why")

    make_tool(tools / "scancel", f"touch {tmp_path}/told")
    for name, value in captured("batch-step", PATH=os.environ["PATH"], CHAIN="linked").items():
        monkeypatch.setenv(name, value)
    call = Call("slurm_train", "x.sh", "", "/", "", "", "", "x.sh")
    monkeypatch.setattr(start, "make_plan", refuse)
    assert start.start(call, [], os.environ) == REFUSED
    assert (tmp_path / "told").exists() == is_cancelled


@pytest.mark.parametrize(
    ("tool", "silent_s", "answer", "told"),
    [
        ("echo 7", 60, "7\n", ""),
        ("exec sleep 60", 0, None, "waiting for squeue --me, 0.5 s at most\n"),
        ("exit 1", 60, None, ""),
    ],
)
def test_a_scheduler_that_thinks_long_is_named(
    tool: str,
    silent_s: float,
    answer: str | None,
    told: str,
    tools: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_tool(tools / "squeue", tool)
    monkeypatch.setattr("distributed.limits.SCHEDULER_SILENT_S", silent_s)
    limit_s = 10 if answer else 0.5
    assert ask_scheduler("squeue", "--me", limit_s=limit_s) == answer
    assert capsys.readouterr().err == told
