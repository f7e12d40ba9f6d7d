"""What SLURM and PBS give a launch, from variables that a real SLURM has set; and the commands
that ask them for a job."""

from __future__ import annotations

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
from launcher.plan import pbs, slurm
from launcher.plan.plan import World
from launcher.plan.submit_with_config import (
    OWN,
    Size,
    choose_preparation,
    choose_size,
    read_sinfo,
    submit_all,
    take_own_settings,
)
from launcher.plan.typed import Typed
from launcher.text import PlanError

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


def test_a_part_of_the_job_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for environ in (captured("sub-step", SLURM_JOB_NUM_NODES="1"), captured("requeued-batch-step")):
        slurm.warn_of_part(environ, "run_ddp.sh")
    assert capsys.readouterr().err == ""
    slurm.warn_of_part(captured("sub-step", SLURM_JOB_NUM_NODES="2"), "run_ddp.sh")
    told = "run_ddp.sh: warning: this step has 1 of the job's 2 nodes, and"
    assert capsys.readouterr().err.startswith(told)


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
    tools: Path, told: str | None, grace_s: int, line: str
) -> None:
    answer = f"echo 'Queue: workq\n{told}'" if told else "exit 1"
    make_tool(tools / "qstat", f'[[ "$*" != "-f 7.host" ]] || exec echo "  a = b"; {answer}')
    job = {"PBS_JOBID": "7.host", "PBS_QUEUE": "workq"}
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
        (
            {**captured("requeued-batch-step"), "SLURM_ARRAY_TASK_ID": "3"},
            True,
            "sbatch --nodes=1 --array=3 S",
        ),
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
    make_tool(tools / "squeue", f'[ "$2" = --job=9_1 ] && echo "{file}"')
    task = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1"}  # the id 9 may be of all tasks
    environ = {**captured("batch-step"), **task}
    command = slurm.job_command(environ, None, ["launch.sh", "--hosts", "job", "x.py"])
    sizes = "sbatch --nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --array=1"
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
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch, fault: str, is_cancelled: bool
) -> None:
    def refuse(*_: object) -> None:
        raise Refused(fault, "why")

    make_tool(tools / "scancel", f"touch {tmp_path}/told")
    call = Call("slurm_train", "x.sh", "", "/", "", "", "", "x.sh")
    monkeypatch.setattr(start, "make_plan", refuse)
    assert start.start(call, [], captured("batch-step", CHAIN="linked")) == REFUSED
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


# --- scripts/submit_with_config.sh ----------------------------------------------------------------


OURS = ("config=c.yaml", "num_gpus_train=2")


@pytest.mark.parametrize(
    ("gpus", "nodes", "expected"),
    [
        (8, [8] * 20, Size(1, 8, is_exclusive=True)),
        (12, [8] * 20, Size(2, 6, is_exclusive=False)),
        (11, [8] * 20, Size(11, 1, is_exclusive=False)),
        (3, [1] * 3, Size(3, 1, is_exclusive=True)),
        (16, [8, 4, 4, 4], Size(4, 4, is_exclusive=False)),  # one node is greater than the others
        (8, [8, 4, 4, 4], Size(1, 8, is_exclusive=True)),
        (64, [8, 4], Size(8, 8, is_exclusive=True)),  # more than there are
    ],
)
def test_as_few_nodes_as_share_the_gpus_evenly(gpus: int, nodes: list[int], expected: Size) -> None:
    assert choose_size(gpus, nodes) == expected


def test_gpus_of_any_type_of_the_partition_that_the_job_goes_to() -> None:
    default = "gpu* n1 gpu:a100:4(S:0-1),gpu:h100:2\ngpu* n2 gpu:8\ngpu* n3 (null)\n"
    assert read_sinfo(f"big n4 gpu:16\n{default}", of_default=True) == [6, 8]
    assert read_sinfo(f"big n4 gpu:16\nbig n1 gpu:6\n{default}", of_default=False) == [16, 6, 8]
    assert read_sinfo("big n1 gpu:16\nbig n2 gpu:16\n", of_default=True) == [16, 16]
    assert read_sinfo("cpu* n1 (null)\n", of_default=True) == []


def own_of(**given: str) -> dict[str, str]:
    return {**dict.fromkeys(OWN, ""), **given}


def test_settings_of_the_submission_and_of_the_training() -> None:
    given = (*OURS, "seed=3", "train.max_steps=5", "mem=4G")
    own, others = take_own_settings(Typed("submit", setting=given))
    assert own == own_of(config="c.yaml", num_gpus_train="2", mem="4G")
    assert others == ["seed=3", "train.max_steps=5"]
    environ = {"TRAIN_SCRIPT": "own.py"}
    typed = Typed("submit", setting=(*OURS, "whatever=1"), environ=environ)
    assert take_own_settings(typed)[1] == ["whatever=1"]


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        (("num_gpus_train=2",), "no config; usage: x.sh ..."),
        ((*OURS, "partitoin=a"), "unknown setting 'partitoin'; did you mean partition? known here"),
        ((*OURS, "num_gpus=x"), "num_gpus is 'x'; give a whole number from 0"),
    ],
)
def test_wrong_settings(settings: tuple[str, ...], cause: str) -> None:
    with pytest.raises(PlanError) as raised:
        take_own_settings(Typed("submit", setting=settings, usage="x.sh ..."))
    assert cause in str(raised.value)


def test_the_script_that_prepares_is_typed_or_the_configs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = own_of(num_gpus="8", prepare="typed.sh")
    assert choose_preparation(own, "config.sh", "x.sh") == "typed.sh"
    assert choose_preparation(own_of(num_gpus="8"), "config.sh", "x.sh") == "config.sh"
    assert choose_preparation(own_of(), "", "x.sh") == "" == capsys.readouterr().err
    assert choose_preparation(own_of(num_gpus="8"), "", "x.sh") == ""
    err = capsys.readouterr().err
    assert err.startswith("x.sh: warning: num_gpus is for a script that prepares the training, ")
    assert err.endswith("; only the training is submitted\n")


def test_a_chain_cannot_be_waited_for() -> None:
    with pytest.raises(PlanError, match="--wait follows one job"):
        take_own_settings(Typed("submit", setting=(*OURS, "chain=2"), wait=True))


def test_other_options_of_sbatch_are_passed_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.plan.submit_with_config.refusal", lambda words: "")
    passed = ("--mail-user", "me@here", "--constraint", "a100&ib")
    typed = Typed("submit", here=Path("/home/own"), passed=passed, is_dry_run=True)  # behind a link
    own = own_of(config="c.yaml", partition="gpu")
    assert submit_all(typed, own, Size(1, 2, is_exclusive=False), ["x.sh"], chain="") == 0
    told = "--partition=gpu --chdir=/home/own --mail-user=me@here '--constraint=a100&ib' x.sh"
    assert f"sbatch --parsable {told}" in capsys.readouterr().err
