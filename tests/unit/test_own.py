"""Variables specific to one node, how other nodes get their own, and what a run leaves idle."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents import ROOT
from captured import captured
from job_tools import job_plan, make_tool

from launcher.fanout import local, pdsh, ssh
from launcher.fanout.connection import forwarded_names, write_opening
from launcher.plan import own, pbs
from launcher.plan.idle import find_idle
from launcher.plan.plan import NodePlan, Plan
from launcher.plan.typed import Choices
from launcher.wire import limits
from launcher.wire.messages import Report

CAPTURED = Path(__file__).resolve().parents[1] / "cluster/pbs"
CUDA = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
PBS = {"PBS_JOBID": "7.host", "NCPUS": "8", "OMP_NUM_THREADS": "8"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2"}
EVERYONES = {"NCCL_DEBUG": "INFO", "OMP_PROC_BIND": "true", "TORCH_LOGS": "x", "HOME": "/home"}
SELECT = "echo '  schedselect = {}'"
BEGUN = "from launcher.plan.own import read_begun; print(sorted(read_begun()))"


@pytest.mark.parametrize("wrapper", ["", "timeout 60 ", "timeout 60 nice ", "setsid -w "])
def test_what_the_shell_began_with_is_known_below_other_programs(wrapper: str) -> None:
    script = f'TYPED=1 {wrapper}"$0" -c "$1"; exit $?'
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "BEGAN": "1"}
    command = ["setsid", "-w", "bash", "-c", script, sys.executable, BEGUN]
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert ("BEGAN=1" in told, "TYPED=1" in told) == (True, False)


@pytest.mark.parametrize(
    ("environ", "begun", "qstat", "names", "is_default"),
    [
        # Values set by PBS belong to one node; a thread per CPU was not the user's choice.
        ({**PBS, **CUDA}, {}, "exit 1", {*CUDA, "NCPUS", "OMP_NUM_THREADS"}, True),
        ({**PBS, **CUDA}, {**PBS, **CUDA}, "", {*CUDA, "NCPUS", "OMP_NUM_THREADS"}, True),
        ({**PBS, "ROCR_VISIBLE_DEVICES": ""}, {}, "", {*PBS, "ROCR_VISIBLE_DEVICES"}, True),
        # Numbers of threads that the user chose: in the script or the shell, in the request.
        ({**PBS, "OMP_NUM_THREADS": "4"}, {}, "", {"NCPUS"}, False),
        (PBS, {}, SELECT.format("2:ncpus=8:ompthreads=8"), {"NCPUS"}, False),
        (PBS, {}, SELECT.format("1:ompthreads=8+1:ompthreads=4"), {*PBS}, False),
        ({"PBS_JOBID": "7", "OMP_NUM_THREADS": "4"}, {}, "", set(), False),  # Torque sets none
        # GPUs that the user chose: for this launch, with qsub -v, by name, with a module.
        ({**PBS, "CUDA_VISIBLE_DEVICES": "0"}, {**PBS, **CUDA}, "", {*PBS}, True),
        (
            *({**PBS, "CUDA_VISIBLE_DEVICES": "0,1"}, {}),
            *(r"echo '  Variable_List = A=1,CUDA_VISIBLE_DEVICES=0\,1,B=2'", {*PBS}, True),
        ),
        ({**PBS, **CUDA, "FORWARD_ENV": "A,CUDA_VISIBLE_DEVICES"}, {}, "", {*PBS, *CUDA}, True),
        ({**PBS, "HIP_VISIBLE_DEVICES": "0", "ACTIVATED": "1"}, {}, "", {*PBS}, True),
        # SLURM, LSF, and nodes that a user names.
        ({**SLURM, **CUDA}, {}, "", {*CUDA}, False),
        ({**SLURM, **CUDA, "OMP_NUM_THREADS": "8", "NCPUS": "8"}, {}, "", {*CUDA}, False),
        ({**captured("batch-step"), **CUDA, "SLURM_GPUS_ON_NODE": ""}, {}, "", set(), False),
        ({"LSB_JOBID": "7", **CUDA}, {}, "", {*CUDA}, False),
        ({**CUDA, "OMP_NUM_THREADS": "8", "NCPUS": "8"}, {}, "", set(), False),
    ],
)
def test_what_is_this_nodes_alone(
    tools: Path,
    plan: Plan,
    environ: dict[str, str],
    begun: dict[str, str],
    qstat: str,
    names: set[str],
    is_default: bool,
) -> None:
    make_tool(tools / "qstat", qstat)
    activated = ["HIP_VISIBLE_DEVICES"] if environ.get("ACTIVATED") else []
    shell = {f"{name}={value}" for name, value in begun.items()}
    names -= {"PBS_JOBID", *own.asked_names(environ)}
    found = own.find_own(Choices(environ=environ, activated=activated), shell)
    assert (found.names, found.is_default) == (names, is_default)
    asked = replace(plan, environ={"A": "", **EVERYONES, **environ}, activated=activated)
    sent = forwarded_names(asked, found.names)
    assert not names & {*sent} and {*EVERYONES} - {"HOME"} <= {*sent}
    assert ("CUDA_VISIBLE_DEVICES" in sent) == ("CUDA_VISIBLE_DEVICES" in {*environ} - names)


def test_threads_that_a_real_pbs_has_set(tools: Path) -> None:
    """A value in -v or -V is overwritten; only `ompthreads` chooses the number with qsub."""
    text = (CAPTURED / "omp-given-by-user.txt").read_text()
    defaults = []
    for select, threads, ncpus in re.findall(r"select=(\S+)\n\w+=(\d+) \w+=(\d+)", text):
        make_tool(tools / "qstat", SELECT.format(select))
        pbs.ask_qstat.cache_clear()
        job = {"PBS_JOBID": "7", "OMP_NUM_THREADS": threads, "NCPUS": ncpus}
        defaults.append(own.find_own(Choices(environ=job), ()).is_default)
    assert defaults == [True, True, False]


@pytest.mark.parametrize(("nproc", "threads"), [(2, None), (1, "8")])
def test_a_node_that_starts_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nproc: int, threads: str | None
) -> None:
    monkeypatch.setattr(
        local, "check_here", lambda plan: Report(0, 1, nproc, "n0", "mine", {}, {}, port=1)
    )
    started: list[Any] = []
    monkeypatch.setattr("os.execvpe", lambda *words: started.append(words))
    plan = job_plan(tmp_path, fanout="local", hosts="", num_nodes=1, environ=PBS)
    local.run(plan, lambda: None)
    assert started[0][2].get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize("fanout", [ssh.SshFanout, pdsh.PdshFanout])
@pytest.mark.parametrize("job", [PBS, SLURM])
def test_what_ssh_and_pdsh_send(
    plan: Plan, fanout: type[ssh.SshFanout], job: dict[str, str]
) -> None:
    launch = fanout(replace(plan, environ={**job, **CUDA, "NCCL_DEBUG": "INFO"}))
    assert launch.plan.forwarded == ["NCCL_DEBUG"]
    opening = write_opening(launch.plan, {"LAUNCH_TOKEN": "t"})
    assert "NCCL_DEBUG=" in opening and "CUDA" not in opening and "OMP" not in opening


@pytest.mark.parametrize("kept", [True, False])
def test_a_node_gets_our_folder_for_temporary_files_if_it_has_it(
    plan: Plan, kept: bool, tmp_path: Path
) -> None:
    ours = tmp_path if kept else tmp_path / "gone"
    launch = ssh.SshFanout(replace(plan, environ={"TMPDIR": str(ours), "JAX_PLATFORMS": "cpu"}))
    assert launch.plan.forwarded == ["JAX_PLATFORMS"]
    opening = write_opening(replace(launch.plan, directory=tmp_path), {"LAUNCH_TOKEN": "t"})
    shown = opening.replace("exec ", "echo $TMPDIR $JAX_PLATFORMS; exit; ")
    environ = {"PATH": os.environ["PATH"], "TMPDIR": "/own"}
    done = subprocess.run(["bash"], input=shown, env=environ, capture_output=True, text=True)
    assert done.stdout.splitlines()[1:] == [f"{ours if kept else '/own'} cpu"], done.stderr


PBSDSH = """
[[ $1 == -- ]] && shift
for node in 0 1 2; do
  PBS_NODENUM=$node CUDA_VISIBLE_DEVICES=GPU-of-$node NCPUS=$((node + 2)) "$@" || exit
done
"""


def job_of(folder: Path, number: int = 0) -> Plan:
    (folder / "nodes").write_text("n0\nn0\nn1\nn2\n")
    nodes = [NodePlan(name) for name in ("n1", "me@n0", "n2", "far")]
    environ = {"PBS_NODENUM": str(number), "PBS_NODEFILE": str(folder / "nodes")}
    environ |= {"CUDA_VISIBLE_DEVICES": "GPU-here", "NCPUS": "2"}
    return job_plan(folder, nodes=nodes, environ=environ)


def test_each_nodes_own_values_come_from_pbsdsh(tools: Path, tmp_path: Path) -> None:
    make_tool(tools / "pbsdsh", PBSDSH)
    plan, elsewhere = job_of(tmp_path), job_of(tmp_path, 2)
    names = {"CUDA_VISIBLE_DEVICES", "NCPUS"}
    told: list[str] = []
    found = own.Own(names, is_default=True)
    found.fetch_values(plan, told.append)
    assert len(told) == 1 and "are unknown (far); " in told[0]
    own.Own({"NCPUS"}, is_default=True).fetch_values(plan, told.append)
    assert len(told) == 1  # a missing NCPUS is not reported
    assert found.values == {
        "n1": {"CUDA_VISIBLE_DEVICES": "GPU-of-1", "NCPUS": "3"},
        "me@n0": {"CUDA_VISIBLE_DEVICES": "GPU-here", "NCPUS": "2"},
        "n2": {"CUDA_VISIBLE_DEVICES": "GPU-of-2", "NCPUS": "4"},
    }
    assert not list((tmp_path / "logs").iterdir())
    (tmp_path / "nodes").unlink()  # as on another node of the job, which has no node file
    assert own.ask_for_values(names, elsewhere) == {}


@pytest.mark.parametrize("pbsdsh", ["exit 1", "exec sleep 600", "true"])
def test_without_an_answer_a_value_stays_where_it_is(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pbsdsh: str
) -> None:
    monkeypatch.setattr(limits, "PBSDSH_S", 0.2)
    make_tool(tools / "pbsdsh", pbsdsh)
    told: list[str] = []
    found = own.Own({"CUDA_VISIBLE_DEVICES"}, is_default=False)
    found.fetch_values(job_of(tmp_path), told.append)
    assert found.values == {"me@n0": {"CUDA_VISIBLE_DEVICES": "GPU-here"}}
    assert told[0].startswith("warning: CUDA_VISIBLE_DEVICES: the scheduler's values for this node")
    assert "n2, far); to send this node's values, set FORWARD_ENV='CUDA_VISIBLE_DEVICES'" in told[0]


@pytest.mark.parametrize(
    ("is_default", "nproc", "threads"),
    [(True, 0, None), (True, 2, None), (True, 1, "8"), (False, 2, "8")],
)
def test_who_gets_the_threads_of_pbs(is_default: bool, nproc: int, threads: str | None) -> None:
    found = own.Own({*PBS}, is_default, {"n0": {"NCPUS": "8", "OMP_NUM_THREADS": "8"}})
    assert found.of_node("n0", nproc).get("OMP_NUM_THREADS") == threads
    assert found.of_node("n0", nproc)["NCPUS"] == "8" and found.of_node("n1", nproc) == {}


# --- the part of a job that a run leaves idle -----------------------------------------------------


IN_SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
ALL = "run_ddp.sh uses all of them [partial-launch]"


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
    environ = {**IN_SLURM, **more}
    assert find_idle(job_plan(tmp_path, num_nodes=num_nodes, nproc=nproc, environ=environ)) == line


def test_the_shell_of_a_step_with_several_nodes(tmp_path: Path, shell: str) -> None:
    step = captured("srun-pty-step", SLURM_TASK_PID=shell)
    plan = job_plan(tmp_path, num_nodes=1, environ=step)
    assert find_idle(plan).startswith("this run uses 1 of the step's 2 nodes; give each")
    assert find_idle(replace(plan, environ={**step, "SLURM_STEP_NUM_NODES": "1"})) == ""
    over_ssh = replace(plan, num_nodes=2)  # as --hosts names them
    assert find_idle(over_ssh) == find_idle(replace(plan, num_spares=1)) == ""
    of_four = replace(over_ssh, environ={**step, "SLURM_STEP_NUM_NODES": "4"})
    assert find_idle(of_four).startswith("this run uses 2 of the step's 4 nodes; ")


def test_a_pbs_job(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    (tmp_path / "gpus").write_text("a-gpu0\na-gpu1\nb-gpu0\nb-gpu1\n")
    job = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_GPUFILE": str(tmp_path / "gpus")}
    alone = job_plan(tmp_path, num_nodes=1, environ=job)
    assert find_idle(alone).startswith("this run uses 1 of the job's 2 nodes; ")
    nodes = (NodePlan("a", 2), NodePlan("b", 1))
    assert find_idle(replace(alone, num_nodes=2, nodes=nodes)).startswith("this run uses 1 of")
    assert find_idle(replace(alone, environ={"PBS_NODEFILE": "/nonexistent"})) == ""
