"""What SLURM and PBS give a launch, with variables from a real SLURM; and the commands that
request a job."""

import contextlib
import json
import os
import re
import shlex
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from captured import captured
from job_tools import make_tool

from distributed.environment import LauncherError
from distributed.errors import REFUSED, Refused
from distributed.job import ask_scheduler, in_slurm_step, this_job
from distributed.lock import lock_run
from launcher import start
from launcher.cli.arguments import Call
from launcher.plan import hosts, pbs, slurm
from launcher.plan.plan import ROOT, World
from launcher.plan.submit_with_config import (
    OWN,
    Size,
    choose_preparation,
    choose_size,
    gpus_of_nodes,
    read_sinfo,
    refusal,
    split_settings,
    submit_all,
)
from launcher.plan.typed import Typed
from launcher.record import run_json
from launcher.record.run_ids import free_run_id
from launcher.text import PlanError

UNEQUAL = {"SLURM_TASKS_PER_NODE": "2,1", "SLURM_NTASKS": "3"}


@pytest.mark.parametrize(
    ("environ", "asked", "cause"),
    [
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


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("one-per-node-step", {}, World(2, "node1", node_rank=1)),
        ("one-per-node-step", {"node_rank": "1", "nnodes": "2"}, World(2, "node1", 1)),
        ("one-per-node-step", {"master": "10.0.0.9"}, World(2, "10.0.0.9", 1)),
        ("sub-step", {}, World(1, "node2", node_rank=0)),
        ("one-per-node-step", {"node_rank": "0"}, "NODE_RANK is '0' but srun's SLURM_NODEID is 1"),
        ("one-per-node-step", {"nnodes": "3"}, "'3' but srun's SLURM_STEP_NUM_NODES is 2"),
        ("srun-step", {}, "srun started 4 tasks on 2 nodes; give it --ntasks=2"),
        (
            "sub-step",  # srun --nodes=1 in a job of two
            {"nnodes": "2", "node_rank": "0"},
            "this step has 1 of the job's 2 nodes; start it with srun --nodes=2 --ntasks=2"
            " --ntasks-per-node=1, without node numbers [wrong-world]",
        ),
    ],
)
def test_place_in_a_step(name: str, given: dict[str, Any], expected: World | str) -> None:
    typed = Typed(fanout="local", environ=captured(name), **given)
    assert in_slurm_step(typed.environ)
    if isinstance(expected, World):
        assert slurm.read_step(typed) == expected
        return
    with pytest.raises((PlanError, LauncherError)) as raised:
        slurm.read_step(typed)
    assert expected in str(raised.value)


def test_a_part_of_the_job_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def warn_of_part(environ: dict[str, str]) -> None:
        slurm.warn_of_part(Typed(fanout="auto", program="run_ddp.sh", environ=environ))

    for environ in (captured("sub-step", SLURM_JOB_NUM_NODES="1"), captured("requeued-batch-step")):
        warn_of_part(environ)
    assert capsys.readouterr().err == ""
    warn_of_part(captured("sub-step", SLURM_JOB_NUM_NODES="2"))
    told = "run_ddp.sh: warning: this step has 1 of the job's 2 nodes, and"
    assert capsys.readouterr().err.startswith(told)


KILLED = "a stop can take {0} s (GRACE + 10), but PBS kills this job {1} s after qdel or"
KILLED += " the walltime (kill_delay of queue workq); ask your administrator to set kill_delay={0}"
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
    assert pbs.describe_short_delay(grace_s, job) == line
    assert pbs.describe_short_delay(grace_s, {**job, "PBS_JOBID": ""}) == ""
    assert pbs.describe_short_delay(grace_s, {"PBS_JOBID": "7.host"}) == ""
    if told == "    enabled = True":
        torque = {**job, "PBS_VERSION": "TORQUE-6.1.2"}
        line = KILLED.format(grace_s + 10, 2)
        line = line.replace("ask", f"submit with qsub -K {grace_s + 10}, or ask")
        assert pbs.describe_short_delay(grace_s, torque) == line


@pytest.mark.parametrize(
    ("job", "queue", "server", "delay"),
    [("", "", "", 2), ("60", "5", "6", 60), ("", "5", "60", 5), ("", "", "60", 60)],
)
def test_torque_kills_as_the_job_the_queue_or_the_server_says(
    tools: Path, job: str, queue: str, server: str, delay: int
) -> None:
    told = {"-f": ("user_kill_delay", job), "-Qf": ("kill_delay", queue)}
    told |= {"-Bf": ("kill_delay", server)}
    lines = [
        f"'{option}') echo '  server = head'; echo '  {name} = {value}' ;;"
        for option, (name, value) in told.items()
    ]
    make_tool(tools / "qstat", f'case "$1" in {" ".join(lines)} esac')
    torque = {"PBS_JOBID": "7.head", "PBS_QUEUE": "batch", "PBS_VERSION": "TORQUE-6.1.2"}
    line = pbs.describe_short_delay(30, torque)
    assert line == "" if delay == 60 else f"PBS kills this job {delay} s after" in line


@pytest.mark.parametrize(
    ("lines", "nodes", "ppn", "is_taken"),
    [
        ("n1 n1 n1 n1", "4", "1", True),  # a scheduler has packed nodes=4:ppn=1
        ("n1 n1 n2 n2 n2 n2", "3", "2", True),
        ("n1 n2 n3", "3", "", True),
        ("n1 n1 n1", "4", "1", False),
        ("n1 n1 n2 n2", "3", "", False),
    ],
)
def test_torque_counts_the_requested_nodes(
    tmp_path: Path, lines: str, nodes: str, ppn: str, is_taken: bool
) -> None:
    (tmp_path / "nodes").write_text(lines.replace(" ", "\n"))
    job = {"PBS_JOBID": "7.head", "PBS_NODEFILE": str(tmp_path / "nodes")}
    job |= {"PBS_NUM_NODES": nodes, "PBS_NUM_PPN": ppn}
    is_fine = contextlib.nullcontext() if is_taken else pytest.raises(PlanError, match="but should")
    with is_fine:
        assert len(pbs.read_nodefile(job, 1)) == len({*lines.split()})


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


@pytest.mark.parametrize(
    ("record", "options"),
    [
        (
            "MinMemoryNode=500M CpusPerTres=gres:gpu:6 ExcNodeList=n[1-2] OverSubscribe=NO",
            " --mem=500M --cpus-per-gpu=6 '--exclude=n[1-2]' --exclusive",
        ),
        ("MinMemoryCPU=4G ExcNodeList=(null) OverSubscribe=OK", " --mem-per-cpu=4G"),
        ("MinMemoryNode=0 MemPerTres=gres:gpu:60", " --mem-per-gpu=60"),
        ("CpusPerTres=gres/gpu:6 MemPerTres=gres/gpu:60", " --mem-per-gpu=60 --cpus-per-gpu=6"),
        ("Account=(null) QOS=N/A", ""),
        (
            "CpusPerTres=gres/gpu:4 TimeLimit=1-00:00:00",
            " --cpus-per-gpu=4 --time=1-00:00:00",
        ),
        (
            "Partition=gpu Account=lab QOS=long TimeLimit=02:00:00 Features=a100|h100",
            " --partition=gpu --account=lab --qos=long --time=02:00:00 '--constraint=a100|h100'",
        ),
        ("TimeLimit=Partition_Limit TresPerNode=(null)", ""),
        ("Partition=gpu Command=/x/job.sh Partition=p", " --partition=gpu"),
    ],
)
def test_the_resume_line_asks_for_what_the_job_had(record: str, options: str, tools: Path) -> None:
    make_tool(tools / "scontrol", f'[[ $* == "show -o job 7" ]] && echo "JobId=7 {record}"')
    environ = captured("salloc-gpus-command", SLURM_JOB_ID="7")
    command = slurm.job_command(environ, "S", ["typed.sh", "c.yaml"])
    size = "salloc --nodes=2 --gpus-per-node=2"
    assert shlex.join(command) == f"{size}{options} typed.sh c.yaml"


@pytest.mark.parametrize(
    ("variable", "record", "option"),
    [
        ("SLURM_GPUS_ON_NODE=4", "gres:gpu:a100:4", "a100:4"),
        ("SLURM_GPUS_ON_NODE=4", "gres/gpu:a100:4", "a100:4"),
        ("SLURM_GPUS_ON_NODE=4", "gres/gpu:4,gres/nvme:1", "4"),
        ("SLURM_GPUS_ON_NODE=4", "gres/nvme:1,gres/gpu:a100:4", "a100:4"),
        ("SLURM_GPUS_ON_NODE=4", "gres/gpu:a100:2,gres/gpu:h100:2", "4"),
        ("SLURM_GPUS_PER_NODE=a100:4", "gres/gpu:a100:4", "a100:4"),
    ],
)
def test_the_resume_line_names_the_model_of_gpu_that_the_job_asked_for(
    variable: str, record: str, option: str, tools: Path
) -> None:
    make_tool(tools / "scontrol", f'echo "JobId=7 TresPerNode={record}"')
    name, _, value = variable.partition("=")
    command = slurm.job_command({**captured("salloc-command"), name: value}, "S", ["typed.sh"])
    assert f"--gpus-per-node={option}" in command


@pytest.mark.parametrize("gres", ["gres:gpu:4", "gres/gpu:4"])
def test_the_options_of_our_batch_scripts_are_not_repeated(gres: str, tools: Path) -> None:
    make_tool(tools / "scontrol", f'echo "CpusPerTres={gres} TimeLimit=1-00:00:00 QOS=long"')
    command = slurm.job_command(captured("requeued-batch-step"), "S", ["typed.sh"])
    assert command == ["sbatch", "--nodes=1", "--qos=long", "S"]
    for name in ("slurm_train.sh", "slurm_train_single_node.sh"):
        text = (ROOT / "scripts/slurm" / name).read_text()
        assert "\n#SBATCH --cpus-per-gpu=4\n" in text
        assert "\n#SBATCH --time=24:00:00\n" in text


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("/home/me/job.sh 5", ["/home/me/job.sh", "5"]),
        ("(null)", []),  # of sbatch --wrap, or of a pipe
        ("", []),
    ],
)
def test_the_batch_file_of_a_users_own_is_submitted_again(
    tools: Path, told: str, words: list[str]
) -> None:
    make_tool(tools / "squeue", f'[ "$2" = --job=9_1 ] && echo "{told}"')
    task = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1"}  # the id 9 may mean all tasks
    environ = {**captured("batch-step"), **task}
    command = slurm.job_command(environ, None, ["launch.sh", "--hosts", "job", "x.py"])
    sizes = "sbatch --nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --array=1"
    assert command == ([*sizes.split(), *words] if words else [])


def test_a_batch_file_with_a_space_in_its_path_can_be_pasted(tools: Path) -> None:
    file = tools / "my $job.sh"
    file.touch()
    make_tool(tools / "squeue", f"echo '{file} 5 x'")
    command = slurm.job_command(captured("batch-step"), None, ["launch.sh", "x.py"])
    assert shlex.join(command).endswith(f" '{file}' 5 x")


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
    (tmp_path / "x.sh").write_text(f"#!/bin/bash\n{lines}\ntrue\n")
    found = hosts.read_batch_script(tmp_path / "x.sh", asked)
    assert (found.num_nodes, found.nproc) == (num_nodes, nproc)


@pytest.mark.parametrize(
    ("code", "reason", "is_cancelled"),
    [
        *((code, "None", True) for code in (0, 1, 2, 143)),
        *((code, "None", False) for code in (75, 137, 138, 140)),
        (143, "TimeLimit", False),
    ],
)
def test_the_rest_of_a_chain_is_cancelled_unless_it_is_needed(
    tmp_path: Path, tools: Path, code: int, reason: str, is_cancelled: bool
) -> None:
    make_tool(tools / "scancel", f'echo "$@" >{tmp_path}/told')
    make_tool(tools / "scontrol", f"echo JobId=7 Reason={reason} Dependency=x")
    linked = {"CHAIN": "linked", "RUN_ID": "linked"}
    slurm.end_chain(code, {**captured("batch-step"), **linked})
    told = tmp_path / "told"
    assert (told.read_text() if told.exists() else "") == (
        "--state=PENDING --name=chain-linked\n" if is_cancelled else ""
    )
    slurm.end_chain(0, linked)  # no batch script


def test_the_chain_of_another_program_is_no_chain_of_jobs(tmp_path: Path, tools: Path) -> None:
    make_tool(tools / "scancel", f"touch {tmp_path}/told")
    slurm.end_chain(0, {**captured("batch-step"), "CHAIN": "A"})
    assert not (tmp_path / "told").exists()


@pytest.mark.parametrize(("fault", "is_cancelled"), [("run-is-live", False), ("few-cpus", True)])
def test_a_copy_of_a_live_run_leaves_the_chain_of_that_run_alone(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch, fault: str, is_cancelled: bool
) -> None:
    def refuse(*_: object) -> None:
        raise Refused(fault, "why")

    make_tool(tools / "scancel", f"touch {tmp_path}/told")
    call = Call("slurm_train", "x.sh", "", "/", "", "", "", "x.sh")
    monkeypatch.setattr(start, "make_plan", refuse)
    environ = captured("batch-step", CHAIN="linked", RUN_ID="linked")
    assert start.main(call, environ) == REFUSED
    assert (tmp_path / "told").exists() == is_cancelled


def test_a_file_that_may_not_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "logs/49.head/run.json")

    monkeypatch.setattr(start, "make_plan", fail)
    call = Call("slurm_train", "x.sh", "", "/", "", "", "", "x.sh")
    assert start.main(call, {}) == REFUSED
    told = "'logs/49.head/run.json': Permission denied; correct its permissions, or choose another "
    told += "(logs: LOG_DIR) [dir-unwritable]\n"
    assert capsys.readouterr().err.endswith(told)


@pytest.mark.parametrize(
    ("tool", "silent_s", "answer", "told"),
    [
        ("echo 7", 60, "7\n", ""),
        ("exec sleep 60", 0, None, "waiting up to 0.5 s for squeue --me\n"),
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


@pytest.mark.parametrize("tool", ["squeue", "sinfo"])
def test_the_filters_of_the_user_do_not_change_our_calls(
    tool: str, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tool(tools / tool, 'compgen -e S | grep -E "^(SQUEUE|SINFO)_"; echo "$0 $# $1"')
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SINFO_PARTITION", "none")
    (tools / "greet").write_text(f"echo >>{tools}/greeted\n")
    monkeypatch.setenv(
        "BASH_ENV", str(tools / "greet")
    )  # sites set it; what it prints is no answer
    assert ask_scheduler(tool, "a b") == f"{tools / tool} 1 a b\n"
    assert (tools / "greeted").read_text() == "\n"  # by the tool itself, which is a bash script
    assert os.environ["SQUEUE_STATES"] == "PENDING"  # the training may call squeue itself


def test_the_filters_of_the_user_do_not_hide_the_gpus(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tool(tools / "sinfo", '[[ -z ${SINFO_PARTITION-} ]] && echo "gpu* n1 gpu:$#"')
    monkeypatch.setenv("SINFO_PARTITION", "none")
    assert gpus_of_nodes("") == [4]
    assert gpus_of_nodes("a,b") == [6]  # with -p a,b


# --- scripts/submit_with_config.sh ----------------------------------------------------------------


OURS = ("config=c.yaml", "num_gpus_train=2")


@pytest.mark.parametrize(
    ("gpus", "nodes", "expected"),
    [
        (8, [8] * 20, Size(1, 8, is_exclusive=True)),
        (12, [8] * 20, Size(2, 6, is_exclusive=False)),
        (11, [8] * 20, Size(11, 1, is_exclusive=False)),
        (3, [1] * 3, Size(3, 1, is_exclusive=True)),
        (16, [8, 4, 4, 4], Size(4, 4, is_exclusive=False)),  # one node is larger than the others
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
    assert read_sinfo(f"\n***\n** a site's banner *\n{default}", of_default=True) == [6, 8]


def own_of(**given: str) -> dict[str, str]:
    return {**dict.fromkeys(OWN, ""), **given}


def test_settings_of_the_submission_and_of_the_training() -> None:
    given = (*OURS, "seed=3", "train.max_steps=5", "mem=4G")
    own, others = split_settings(Typed("submit", setting=given))
    assert own == own_of(config="c.yaml", num_gpus_train="2", mem="4G")
    assert others == ["seed=3", "train.max_steps=5"]
    environ = {"TRAIN_SCRIPT": "own.py"}
    typed = Typed("submit", setting=(*OURS, "whatever=1"), environ=environ)
    assert split_settings(typed)[1] == ["whatever=1"]


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        (("num_gpus_train=2",), "no config; usage: x.sh ..."),
        ((*OURS, "partitoin=a"), "unknown setting 'partitoin'; did you mean partition? known"),
        ((*OURS, "num_gpus=x"), "num_gpus is 'x'; give a whole number from 0"),
        ((*OURS, "chain=2"), "--wait follows one job"),
    ],
)
def test_wrong_settings(settings: tuple[str, ...], cause: str) -> None:
    with pytest.raises(PlanError) as raised:
        split_settings(Typed("submit", setting=settings, usage="x.sh ...", wait=True))
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


def test_other_options_of_sbatch_are_passed_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.plan.submit_with_config.refusal", lambda words: "")
    passed = ("--mail-user", "me@here", "--constraint", "a100&ib")
    typed = Typed("submit", here=Path("/home/own"), passed=passed, is_dry_run=True)  # behind a link
    own = own_of(config="c.yaml", partition="gpu")
    assert submit_all(typed, own, Size(1, 2, is_exclusive=False), ["x.sh"]) == 0
    told = "--partition=gpu --chdir=/home/own --mail-user=me@here '--constraint=a100&ib' x.sh"
    assert f"sbatch --parsable {told}" in capsys.readouterr().err


BANNER = "echo '--------'; echo 'Welcome to cluster 9'; echo"


def submit_chain(tools: Path, script: str, number: str) -> int:
    """Submit jobs with an sbatch that appends its words to a file, then runs the script."""
    start = f'cd {tools}; [[ $* == *--test-only* ]] && exit; echo "$*" >>calls'
    make_tool(tools / "sbatch", f"{start}; {script}")
    own = own_of(config="c.yaml", chain=number)
    size = Size(1, 2, is_exclusive=False)
    typed = Typed("submit", program="x.sh", environ={"RUN_ID": "it"})
    return submit_all(typed, own, size, ["x.sh"])


NUMBER_OF_CALLS = "$(wc -l <calls)"


@pytest.mark.parametrize(
    "script",
    [
        f"{BANNER}; echo 4{NUMBER_OF_CALLS}",
        f'echo "4{NUMBER_OF_CALLS};other-cluster"; {BANNER}',
        f"echo 2026; {BANNER}; echo 4{NUMBER_OF_CALLS}; echo; echo 'your job is 7'",
    ],
)
def test_the_last_number_that_a_sites_sbatch_prints_is_the_job(
    script: str, tools: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert submit_chain(tools, script, "2") == 0
    told = capfd.readouterr().err
    assert re.findall(r"^job +(\S+)", told, re.M) == ["41", "42"]
    assert "Welcome to cluster 9\n" in told
    calls = (tools / "calls").read_text().splitlines()
    assert "--dependency=afterany:41 " in calls[1]
    assert all(" --job-name=chain-it " in call for call in calls)


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (f"echo 41; [[ {NUMBER_OF_CALLS} == 1 ]] || exit 7", "failed with exit code 7, see above"),
        (f"{BANNER}; [[ {NUMBER_OF_CALLS} != 1 ]] || echo 41", "printed no job id"),
    ],
)
def test_a_chain_that_is_half_submitted_names_its_jobs(
    script: str, cause: str, tools: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        submit_chain(tools, script, "5")
    assert raised.value.code == 3
    assert len((tools / "calls").read_text().splitlines()) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"x.sh: sbatch {cause}; queued before it: 41; to cancel, run scancel 41"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"dependency": "afterany:7"}, "its dependency is afterany:7"),
        ({"dependency": "afterok:7"}, "its dependency is afterok:7"),
        ({"prepare": "p.sh"}, "job 41 failed; see logs/slurm-41.out"),
        ({"dependency": "afterok:7", "prepare": "p.sh"}, "job 41 failed; see logs/slurm-41.out"),
    ],
)
def test_why_a_job_did_not_start(
    changes: dict[str, str], why: str, tools: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.chdir(tools)
    make_tool(
        tools / "sbatch", f"[[ $1 == --test-only ]] && exit; echo >>calls; echo 4{NUMBER_OF_CALLS}"
    )
    own = own_of(config="c.yaml", **changes)
    typed = Typed("submit", program="x.sh", wait=True)
    assert submit_all(typed, own, Size(1, 2, is_exclusive=False), ["x.sh"]) == 1
    told = f"x.sh: job {42 if 'prepare' in changes else 41} did not start"
    assert capfd.readouterr().err.splitlines()[-1] == (f"{told}: {why}" if why else told)


def test_a_banner_of_sbatch_is_no_cause(tools: Path) -> None:
    make_tool(
        tools / "sbatch", f"{BANNER}; echo 'allocation failure: no node' >&2; {BANNER}; exit 1"
    )
    assert refusal(["x.sh"]) == "allocation failure: no node"


# --- what a PBS job received, from the output of a real OpenPBS -----------------------------------


TOLD = ROOT / "tests/cluster/pbs"


def told(name: str) -> str:
    return (TOLD / f"{name}.txt").read_text()


def ranks_of(select: str, lines: str) -> tuple[dict[str, int], bool]:
    return pbs.count_ranks(lines.split(), pbs.read_chunks({"schedselect": select}))


@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        ("47", {"node1": 4, "node2": 1, "node3": 1}),  # one line among several is one rank
        ("48", {"node1": 2}),
        ("49", {"node1": 1, "node2": 1}),
        ("50", {"node1": 8}),
        ("52", {}),
        ("53", {}),
        ("54", {"node1": 2, "node2": 2}),
        ("56", {}),
    ],
)
def test_the_ranks_of_captured_requests(job: str, ranks: dict[str, int]) -> None:
    found = re.search(rf"^qsub (.*?) *-> {job}\.head\n.*\n(.*)\n", told("nodefiles"), re.M)
    assert found
    select = re.search(r"select=(\S+)", found[1])
    assert ranks_of(select[1] if select else "", found[2])[0] == ranks


@pytest.mark.parametrize(
    ("select", "lines", "ranks", "is_chosen"),
    [
        ("2:ncpus=16:ngpus=4", "n1 n1", {"n1": 8}, True),  # packed
        ("2:ncpus=16:ngpus=4", "n1 n2", {"n1": 4, "n2": 4}, True),  # scattered
        ("3:ngpus=2", "n1 n1 n2", {"n1": 4, "n2": 2}, True),
        ("2:ncpus=8:mpiprocs=1:ngpus=4", "n1 n2", {"n1": 4, "n2": 4}, True),
        ("1:ncpus=1+2:ncpus=8:ngpus=4", "n0 n1 n2", {"n0": 1, "n1": 4, "n2": 4}, True),
        ("2:mpiprocs=2:ngpus=4", "n1 n1 n2 n2", {"n1": 2, "n2": 2}, True),  # the user's choice
        ("ngpus=4", "n1", {"n1": 4}, True),
        ("2:ncpus=16", "n1 n1", {"n1": 2}, False),
        ("2:ngpus=4", "n1 n1 n2", {"n1": 2, "n2": 1}, False),  # does not match these lines
        ("", "n1 n1", {"n1": 2}, False),
        ("", "n1 n2", {}, False),
    ],
)
def test_the_ranks_of_chunks(
    select: str, lines: str, ranks: dict[str, int], is_chosen: bool
) -> None:
    assert ranks_of(select, lines) == (ranks, is_chosen)


def test_what_qstat_tells(tools: Path) -> None:
    make_tool(tools / "qstat", f'[[ $* == "-f 1.head" ]] && cat {TOLD}/qstat-f-running.txt')
    told = pbs.ask_qstat("1.head")
    assert told["Resource_List.select"] == "2:ncpus=2:mpiprocs=2"
    assert told["Variable_List"].endswith("RUN_ID=,X=1,PBS_O_QUEUE=workq,PBS_O_HOST=head")
    assert pbs.read_chunks(told) == [{"ncpus": "2", "mpiprocs": "2"}] * 2
    assert pbs.ask_qstat("2.head") == {}


@pytest.mark.parametrize(
    ("conf", "environ", "added"),
    [
        ("PBS_SERVER=head\nPBS_EXEC=/opt/pbs\n", {}, ":/opt/pbs/bin"),
        ("#PBS_EXEC=/old\n  PBS_EXEC='/opt/pbs' # ours\nPBS_EXEC_X=/no\n", {}, ":/opt/pbs/bin"),
        ("PBS_SERVER=t\374r\nPBS_EXEC=/opt/pbs\n", {}, ":/opt/pbs/bin"),
        ("PBS_SERVER=head\n", {}, ""),
        (None, {}, ""),
        ("PBS_EXEC=/opt/pbs\n", {"PBS_JOBID": ""}, ""),
        ("PBS_EXEC=/opt/pbs\n", {"PATH": "TOOLS"}, ""),  # it has a qstat
    ],
)
def test_the_folder_of_pbss_commands(
    tools: Path, tmp_path: Path, conf: str | None, environ: dict[str, str], added: str
) -> None:
    make_tool(tools / "qstat", "exit 1")
    if conf is not None:
        (tmp_path / "pbs.conf").write_bytes(conf.encode("latin-1"))
    path = environ.get("PATH", "/bin:/usr/bin").replace("TOOLS", str(tools))
    job = {"PBS_JOBID": "7.head", "PBS_CONF_FILE": str(tmp_path / "pbs.conf")}
    job |= environ | {"PATH": path}
    pbs.add_tools_to_path(job)
    assert job["PATH"] == path + added


# --- commands and job ids -------------------------------------------------------------------------


SCRIPT = ROOT / "scripts/pbs/pbs_train.sh"
TORQUE = """Job Id: 7.head
    Job_Name = train
    queue = batch
    ctime = Thu Nov 26 08:40:51 2026
    Join_Path = oe
    Output_Path = head:/home/user/kit/logs/
    Resource_List.nodes = 2:ppn=4
    Resource_List.walltime = 01:00:00
    start_count = 1
"""


@pytest.fixture
def qstat(tools: Path, tmp_path: Path) -> Path:
    """The file with the text that qstat prints; without it, qstat does not answer."""
    make_tool(tools / "qstat", f"cat {tmp_path}/told")
    return tmp_path / "told"


def tell(qstat: Path, text: str) -> None:
    """Make qstat print a text from now on, as for another launch."""
    qstat.write_text(text)
    pbs.ask_qstat.cache_clear()


def note(qstat: Path, text: str) -> None:
    """Act as another launch of this job, for which qstat prints a text."""
    tell(qstat, text)
    pbs.set_launch_job(os.environ)


def be_in_job(job: str) -> None:
    os.environ.update(PBS_JOBID=job, PBS_ENVIRONMENT="PBS_BATCH")


# --- the command that asks for a job ------------------------------------------------------------

IN_TORQUE = {"PBS_VERSION": "TORQUE-6.1.2"}
OUT = "-j oe -o /home/user/kit/logs/"
TWO = "-l select=2:ncpus=2:mpiprocs=2 -l place=scatter"
END = f"-- {SCRIPT} c.yaml 'a b'"
TORQUES_END = f"-F 'c.yaml '\"'\"'a b'\"'\"'' {SCRIPT}"
ALTERED = (
    told("qstat-f-running")
    .replace("Job_Name = train", "Job_Name = mine\n    Account_Name = lab")
    .replace("project = _pbs_project_default", "project = ab12")
    .replace("walltime = 24:00:00", "walltime = 01:00:00")
    .replace("kit/logs/", "kit/logs/mine.out")
)


@pytest.mark.parametrize(
    ("text", "more", "expected"),
    [
        (  # requested as in Torque: -l nodes=2:ppn=2
            told("qstat-xf-success-nodes-ppn"),
            {},
            f"-N train -l walltime=24:00:00 {OUT} {TWO} -q workq {END}",
        ),
        (  # no walltime was requested
            told("qstat-xf-dashdash-absolute-path"),
            {},
            f"-N train {OUT} -l select=2:ncpus=1 -l place=scatter -q workq {END}",
        ),
        (
            told("qstat-xf-array-subjob"),
            {},
            f"-N train -l walltime=24:00:00 {OUT} -l select=1:ncpus=1 -l place=free -q workq {END}",
        ),
        (
            ALTERED,
            {"PBS_O_QUEUE": "route"},
            f"-N mine -l walltime=01:00:00 {OUT} {TWO} -A lab -P ab12 -q route {END}",
        ),
        (
            told("qstat-xf-site-resources"),
            {},
            f"-N train -l walltime=00:20:00 {OUT} -l select=1:ncpus=1 -l place=free "
            "-l filesystems=home:eagle -l storage=gdata/ab1 -m abe -M user@site -q workq -r n "
            f"{END}",
        ),
        (
            TORQUE.replace("    start", "    Resource_List.mem = 8gb\n    start"),
            IN_TORQUE,
            f"-N train -l walltime=01:00:00 {OUT} -l nodes=2:ppn=4 -l mem=8gb -q workq "
            f"{TORQUES_END}",
        ),
        (
            TORQUE,
            IN_TORQUE,
            f"-N train -l walltime=01:00:00 {OUT} -l nodes=2:ppn=4 -q workq {TORQUES_END}",
        ),
        ("", {}, ""),
        ("", IN_TORQUE, ""),
    ],
)
def test_qsub_for_a_job_like_this_one(
    qstat: Path, text: str, more: dict[str, str], expected: str
) -> None:
    tell(qstat, text)
    environ = {"PBS_JOBID": "1.head", "PBS_O_QUEUE": "workq", **more}
    command = pbs.job_command(environ, SCRIPT, ["typed.sh", "c.yaml", "a b"])
    assert shlex.join(command) == (expected and f"qsub -V {expected}")


@pytest.mark.parametrize("array", ["-J 0-3", "-t 0-3"])  # the latter: Torque
def test_a_job_like_this_one_is_no_array(tmp_path: Path, qstat: Path, array: str) -> None:
    tell(qstat, told("qstat-xf-array-subjob"))
    (tmp_path / "array.pbs").write_text(f"#PBS {array}\n#PBS -p 3\n")
    command = pbs.job_command({"PBS_JOBID": "1.head"}, tmp_path / "array.pbs", ["typed.sh"])
    assert "-p 3 " in shlex.join(command)
    assert array not in shlex.join(command)


@pytest.mark.parametrize(
    ("text", "lines", "expected"),
    [
        (  # -v PREFLIGHT_SECONDS=90 own.pbs
            told("qstat-xf-own-script-qdel-143"),
            "#!/bin/bash\n#PBS -l place=scatter\n#PBS -p 3\n",
            "-l place=scatter -p 3 -l select=2:ncpus=1 -l walltime=00:10:00 -N own "
            f"{OUT} -q workq own.pbs",
        ),
        (told("qstat-xf-own-script-qdel-143"), "#PBS -J 1-3\n", ""),  # all tasks of an array
        (told("qstat-xf-own-script-qdel-143"), "#PBS -t 0-3\n", ""),  # Torque's option
        (told("qstat-xf-own-script-qdel-143"), "#PBS  -N x\t-t 0-3\n", ""),
        (told("qstat-xf-own-script-qdel-143"), None, ""),
        (TORQUE + "    submit_args = -q batch own.pbs\n", "", None),
        ("", "", ""),
    ],
)
def test_the_users_own_batch_file_is_submitted_again(
    tmp_path: Path, qstat: Path, text: str, lines: str | None, expected: str | None
) -> None:
    tell(qstat, text)
    if lines is not None:
        (tmp_path / "own.pbs").write_text(lines)
    job = {"PBS_JOBID": "29.head", "PBS_O_QUEUE": "workq", "PBS_O_WORKDIR": str(tmp_path)}
    job |= IN_TORQUE if expected is None else {}
    command = shlex.join(pbs.own_command(job, ["launch.sh", "--hosts", "job", "x.py"]))
    if expected is None:
        expected = f"-l nodes=2:ppn=4 -l walltime=01:00:00 -N train {OUT} -q workq own.pbs"
    assert command == (expected and f"qsub -V {expected}")


def test_a_launch_script_that_follows_the_dashes_is_submitted_again(qstat: Path) -> None:
    tell(qstat, told("qstat-xf-dashdash-absolute-path"))
    command = pbs.own_command({"PBS_JOBID": "1.head"}, [str(SCRIPT), "--hosts", "job", "x.py"])
    assert shlex.join(command).endswith(f" -- {SCRIPT} --hosts job x.py")


@pytest.mark.parametrize(
    ("version", "environ", "expected"),
    [
        ("echo pbs_version = 2022.1.3", {}, f"-l select=1:ncpus=1:mpiprocs=1 {END}"),
        ("", {"NPROC_PER_NODE": "8"}, f"-l select=1:ncpus=8:mpiprocs=8 {END}"),
        ("echo Version: 6.1.2 >&2", {"NPROC_PER_NODE": "8"}, f"-l nodes=1:ppn=8 {TORQUES_END}"),
    ],
)
def test_qsub_outside_a_job(
    tools: Path, version: str, environ: dict[str, str], expected: str
) -> None:
    make_tool(tools / "qsub", version)
    command = pbs.job_command(environ, SCRIPT, ["typed.sh", "c.yaml", "a b"])
    assert shlex.join(command) == (
        f"qsub -V -N train -l walltime=24:00:00 -j oe -o logs/ {expected}"
    )


# --- what identifies a job ----------------------------------------------------------------------

FIRST = told("qstat-xf-requeued").replace("run_count = 2", "run_count = 1")


@pytest.mark.parametrize(
    ("first", "later", "session", "run_id"),
    [
        (FIRST, FIRST, 1, "26.head.1"),  # a second launch in one job
        (FIRST, FIRST, 2, "26.head.1"),  # from another terminal
        (FIRST, told("qstat-xf-requeued"), 2, "26.head"),  # PBS has restarted it: it resumes
        (FIRST, FIRST.replace("08:47:09", "18:47:09"), 2, "26.head"),  # rejected by the lock
        # If qstat does not answer, the session decides.
        (FIRST, "", 1, "26.head.1"),
        ("", FIRST, 1, "26.head.1"),
        ("", "", 1, "26.head.1"),
        ("", "", 2, "26.head"),
        (FIRST, "", 2, "26.head"),
    ],
)
def test_each_launch_in_a_job_is_a_run_of_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    qstat: Path,
    first: str,
    later: str,
    session: int,
    run_id: str,
) -> None:
    be_in_job("26.head")
    monkeypatch.setattr(os, "getsid", lambda _: 1)
    note(qstat, first)
    run_json.note_start(tmp_path / "26.head", os.environ)
    monkeypatch.setattr(os, "getsid", lambda _: session)
    note(qstat, later)
    assert free_run_id(tmp_path, "26.head", os.environ, of_job=True, is_dry_run=True) == run_id
    assert run_json.job_start(os.environ) == (1 if "run_count = 2" in later else 0)


def test_a_job_of_torque_is_known_by_its_own_names(qstat: Path) -> None:
    be_in_job("7.head")
    tell(qstat, TORQUE)
    pbs.set_launch_job(os.environ)
    assert pbs.names_from_qsub(os.environ) == []
    when = "Thu Nov 26 08:40:51 2026"
    this = {"job": "7.head", "run_id": "7.head", "start": 0, "cluster": "head", "submitted": when}
    assert this_job(os.environ) == this == json.loads(os.environ["LAUNCH_JOB"])


@pytest.mark.parametrize(
    ("run", "later", "is_refused"),
    [
        ("26.head", FIRST, False),
        ("26.head", told("qstat-xf-requeued"), False),
        ("26.head", "", False),
        # The server was reinstalled.
        ("26.head", FIRST.replace("08:47:09", "18:47:09"), True),
        ("26.head.1", FIRST.replace("08:47:09", "18:47:09"), True),
        ("mine", FIRST.replace("08:47:09", "18:47:09"), False),
    ],
)
def test_another_job_of_the_same_id_is_refused(
    tmp_path: Path, qstat: Path, run: str, later: str, is_refused: bool
) -> None:
    be_in_job("26.head")
    (tmp_path / run).mkdir()
    (tmp_path / run / "run.json").touch()  # in the log folder: the checkpoints are elsewhere
    note(qstat, FIRST)
    lock_run(tmp_path / run).close()
    note(qstat, later)
    cause = r"another job with the same id \(cluster head, submitted Thu Nov 26 08:.*"
    cause += rf"add resume=checkpoints/{run} \(or in checkpoint.dir\) \[foreign-run\]"
    refusal = pytest.raises(Refused, match=cause) if is_refused else contextlib.nullcontext()
    with refusal:
        lock_run(tmp_path / run).close()


def test_a_job_that_was_started_again_takes_over_from_a_live_start(
    tmp_path: Path, qstat: Path
) -> None:
    be_in_job("26.head")
    note(qstat, FIRST)
    (tmp_path / "26.head").mkdir()
    first = lock_run(tmp_path / "26.head")
    note(qstat, told("qstat-xf-requeued"))
    second = lock_run(tmp_path / "26.head")
    with pytest.raises(Refused, match="was restarted on "), first.committing():
        pass
    second.close()


def test_a_second_start_waits_until_the_first_has_stopped(
    tmp_path: Path, qstat: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    be_in_job("26.head")
    note(qstat, FIRST)
    folder = tmp_path / "26.head"
    start.end_earlier_start(folder, os.environ, 30)
    run_json.note_start(folder, os.environ)
    first = run_json.LiveRecord(
        folder, attempt=0, launcher=None, versions={}, hosts=("n",), world_size=1
    )
    assert not first.notice_takeover()

    def stop() -> None:
        """Act as the agent of the first start, which sees the second one, and exits."""
        while not first.notice_takeover():
            time.sleep(0.01)
        first._lock.close()

    note(qstat, told("qstat-xf-requeued"))
    agent = threading.Thread(target=stop)
    agent.start()
    start.end_earlier_start(folder, os.environ, 30)
    assert first._lock.fd < 0
    agent.join()
    waiting = f"waiting up to 55 s for this job's earlier start, on {os.uname().nodename}, to save"
    assert capsys.readouterr().err == f"{waiting} and stop\n"
    (folder / "run.json").write_text("{")
    assert not first.notice_takeover()


# --- variables that a user gives the job --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("qstat-f-running", ["CONFIG", "RUN_ID", "X"]),  # -v CONFIG=config/local3.yaml,RUN_ID=,X=1
        ("qstat-xf-dashdash-absolute-path", []),  # -V
        ("qstat-xf-array-subjob", ["CONFIG"]),
    ],
)
def test_what_qsub_v_has_set(qstat: Path, name: str, names: list[str]) -> None:
    be_in_job("1.head")
    tell(qstat, told(name))
    assert pbs.names_from_qsub(os.environ) == names


def test_a_damaged_variable_of_the_job_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    call = Call("slurm_train", "x.sh", "", "/", "", "", "", "x.sh")
    environ = captured("batch-step", SLURM_TASKS_PER_NODE="many")
    assert start.main(call, environ) == 2
    told = capsys.readouterr().err
    assert told == "x.sh: SLURM_TASKS_PER_NODE=many cannot be read; use srun [wrong-world]\n"


@pytest.mark.parametrize(
    ("shown", "has_ended"),
    [
        ("JobId=7 JobState=RUNNING", False),
        ("JobId=7 JobState=CONFIGURING", False),
        ("JobId=7 JobState=PENDING", False),  # SLURM has requeued it
        ("JobId=7 JobState=COMPLETING", True),
        ("JobId=7 JobState=CANCELLED", True),
        (r"JobId=6 JobState=COMPLETED\nJobId=7 JobState=RUNNING", False),  # tasks of the array 7
        ("slurm_load_jobs error: Invalid job id specified", True),  # SLURM has deleted its record
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", False),
        ("", False),
    ],
)
def test_a_job_has_ended_if_slurm_says_so(
    shown: str, has_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = "error" in shown
    made = f"printf '%b\\n' '{shown}' >&{1 + fails}; exit {fails:d}"
    make_tool(tmp_path / "scontrol", f'[[ $* == "show -o job 7" ]] || exit 2; {made}')
    make_tool(tmp_path / "squeue", "")  # answers from a cache that does not have the job
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert slurm.has_ended("7") == has_ended


PREEMPTED = "JobState=RUNNING PreemptTime=2026-11-29T01:00:09"
NO_QOS = "exit 1"  # of sacctmgr, on a cluster without accounting


@pytest.mark.parametrize(
    ("job", "qos", "partition", "mode"),
    [
        (PREEMPTED, NO_QOS, "PreemptMode=REQUEUE", "REQUEUE"),
        (PREEMPTED, NO_QOS, "PreemptMode=CANCEL", "CANCEL"),
        (PREEMPTED, NO_QOS, "PreemptMode=GANG,SUSPEND", "GANG,SUSPEND"),
        (PREEMPTED, "echo requeue", "PreemptMode=OFF", "REQUEUE"),
        (PREEMPTED, "echo cancel", "PreemptMode=REQUEUE", "CANCEL"),
        (PREEMPTED, "echo cluster", "PreemptMode=REQUEUE", "REQUEUE"),  # it has none of its own
        (PREEMPTED.replace("RUNNING", "CANCELLED"), NO_QOS, "PreemptMode=REQUEUE", ""),
        ("JobState=RUNNING PreemptTime=None", NO_QOS, "PreemptMode=REQUEUE", ""),
        ("", "", "", ""),  # SLURM does not answer
    ],
)
def test_the_mode_of_a_preemption_is_that_of_the_qos_or_of_the_partition(
    job: str, qos: str, partition: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tool(
        tmp_path / "scontrol",
        f'case $* in "show -o job 5_2") echo "JobId=7 QOS=q Partition=low {job}" ;; '
        f'"show -o partition low") echo "PartitionName=low {partition}" ;; *) exit 1 ;; esac',
    )
    make_tool(tmp_path / "sacctmgr", f'[[ $* == *" qos name=q "* ]] || exit 1; {qos}')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    environ = captured("array-batch-step", SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2")
    assert slurm.preempt_mode(environ) == mode
    salloc = {name: one for name, one in environ.items() if name != "SLURM_PROCID"}
    assert slurm.preempt_mode(salloc) == ("CANCEL" if mode else "")


@pytest.mark.parametrize(
    ("changes", "is_ended"),
    [
        ({}, True),
        ({"SLURM_NODEID": "2"}, False),  # one of the first two has ended it
        ({"SLURM_TASK_PID": "1"}, False),  # the script is only a part of the task
        ({"SLURM_STEP_NUM_NODES": "1"}, False),
        ({"SLURM_STEP_ID": ""}, False),
    ],
)
def test_a_task_that_refuses_ends_its_step(
    changes: dict[str, str], is_ended: bool, tmp_path: Path, tools: Path
) -> None:
    make_tool(tools / "scancel", f'echo "$@" >{tmp_path}/told')
    step = captured("one-per-node-step", SLURM_TASK_PID=str(os.getpid()), SLURM_JOB_ID="7")
    before = signal.getsignal(signal.SIGTERM)
    try:
        slurm.end_step({**step, "SLURM_STEP_ID": "3", "SLURM_NODEID": "1", **changes})
    finally:
        signal.signal(signal.SIGTERM, before)
    told = tmp_path / "told"
    assert (told.read_text() if told.exists() else "") == (
        "--quiet --signal=TERM 7.3\n" if is_ended else ""
    )


def test_a_node_file_that_cannot_be_read_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the run would train on this node alone."""
    (tmp_path / "nodes").write_text("n1\nn2\n")

    def refuse(file: Path, **_: str) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(PermissionError):
        pbs.read_lines({"PBS_NODEFILE": str(tmp_path / "nodes")})
