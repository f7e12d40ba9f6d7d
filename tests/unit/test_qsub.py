"""What PBS tells of a job, from what an OpenPBS 23.06 has shown: tests/cluster/pbs/."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from job_tools import make_tool

from distributed.errors import Refused
from distributed.job import job_start, this_job
from distributed.lock import RunLock
from launcher.plan import pbs, resume
from launcher.plan.plan import ROOT
from launcher.record import run_json
from launcher.record.run_ids import next_run_id

SCRIPT = ROOT / "scripts/pbs/pbs_train.sh"
TOLD = ROOT / "tests/cluster/pbs"
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


def told(name: str) -> str:
    return (TOLD / f"{name}.txt").read_text()


@pytest.fixture
def qstat(tools: Path, tmp_path: Path) -> Path:
    """The text that qstat shows; without it, qstat does not answer."""
    make_tool(tools / "qstat", f"cat {tmp_path}/told")
    return tmp_path / "told"


def tell(qstat: Path, text: str) -> None:
    """Have qstat show a text from now on, as to another launch."""
    qstat.write_text(text)
    pbs.ask_qstat.cache_clear()


def be_in_job(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "LAUNCH_JOB", "FORWARD_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PBS_JOBID", job)
    monkeypatch.setenv("PBS_ENVIRONMENT", "PBS_BATCH")


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
        (told("qstat-f-running"), {}, f"-N train -l walltime=24:00:00 {OUT} {TWO} -q workq {END}"),
        (  # asked for as in Torque: -l nodes=2:ppn=2
            told("qstat-xf-success-nodes-ppn"),
            {},
            f"-N train -l walltime=24:00:00 {OUT} {TWO} -q workq {END}",
        ),
        (  # no walltime was asked for
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


@pytest.mark.parametrize(
    ("version", "environ", "expected"),
    [
        ("echo pbs_version = 23.06.06", {}, f"-l select=1:ncpus=1:mpiprocs=1 {END}"),
        ("echo pbs_version = 2022.1.3", {}, f"-l select=1:ncpus=1:mpiprocs=1 {END}"),
        ("", {"NPROC_PER_NODE": "8"}, f"-l select=1:ncpus=8:mpiprocs=8 {END}"),
        (
            "echo Version: 6.1.2 >&2",
            {"NPROC_PER_NODE": "8"},
            f"-l nodes=1:ppn=8 {TORQUES_END}",
        ),
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
        (FIRST, FIRST, 2, "26.head.1"),  # from a terminal of its own
        (FIRST, told("qstat-xf-requeued"), 2, "26.head"),  # PBS has started it again: it resumes
        (FIRST, FIRST.replace("08:47:09", "18:47:09"), 2, "26.head"),  # refused by the lock
        # Where qstat is silent, the session tells.
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
    be_in_job(monkeypatch, "26.head")
    monkeypatch.setattr(os, "getsid", lambda _: 1)
    tell(qstat, first)
    pbs.note_job(os.environ)
    run_json.note_start(tmp_path / "26.head", job=run_json.this_start())
    monkeypatch.setattr(os, "getsid", lambda _: session)
    tell(qstat, later)
    pbs.note_job(os.environ)
    assert next_run_id(tmp_path, "26.head") == run_id
    assert job_start() == (1 if "run_count = 2" in later else 0)


def test_a_job_of_torque_is_known_by_its_own_names(
    monkeypatch: pytest.MonkeyPatch, qstat: Path
) -> None:
    be_in_job(monkeypatch, "7.head")
    tell(qstat, TORQUE)
    assert pbs.note_job(os.environ) == []
    when = "Thu Nov 26 08:40:51 2026"
    this = {"job": "7.head", "run_id": "7.head", "start": 0, "cluster": "head", "submitted": when}
    assert this_job() == this == json.loads(os.environ["LAUNCH_JOB"])


@pytest.mark.parametrize("run", ["26.head", "26.head.1", "mine"])
@pytest.mark.parametrize(
    ("later", "is_refused"),
    [
        (FIRST, False),
        (told("qstat-xf-requeued"), False),
        (FIRST.replace("08:47:09", "18:47:09"), True),  # the server was installed again
        ("", False),
    ],
)
def test_another_job_of_the_same_id_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    qstat: Path,
    later: str,
    is_refused: bool,
    run: str,
) -> None:
    be_in_job(monkeypatch, "26.head")
    (tmp_path / run).mkdir()
    for text in (FIRST, later):
        tell(qstat, text)
        pbs.note_job(os.environ)
        try:
            RunLock(tmp_path / run, f"run {run}").close()
        except Refused as refused:
            cause = "belongs to another job of the same id (cluster head, submitted Thu Nov 26 08:"
            assert text == later and is_refused and run != "mine"
            assert cause in str(refused) and "[foreign-run]" in str(refused)
        else:
            assert text == FIRST or not is_refused or run == "mine"


def test_a_job_that_was_started_again_takes_over_from_a_live_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qstat: Path
) -> None:
    be_in_job(monkeypatch, "26.head")
    tell(qstat, FIRST)
    pbs.note_job(os.environ)
    (tmp_path / "26.head").mkdir()
    first = RunLock(tmp_path / "26.head", "run")
    tell(qstat, told("qstat-xf-requeued"))
    pbs.note_job(os.environ)
    second = RunLock(tmp_path / "26.head", "run")
    with pytest.raises(Refused, match="was restarted on "), first.committing():
        pass
    second.close()


# --- variables that a user gives the job --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("qstat-f-running", ["CONFIG", "RUN_ID", "X"]),  # -v CONFIG=config/local3.yaml,RUN_ID=,X=1
        ("qstat-xf-dashdash-absolute-path", []),  # -V
        ("qstat-xf-array-subjob", ["CONFIG"]),
    ],
)
def test_what_qsub_v_has_set(
    monkeypatch: pytest.MonkeyPatch, qstat: Path, name: str, names: list[str]
) -> None:
    be_in_job(monkeypatch, "1.head")
    tell(qstat, told(name))
    assert pbs.note_job(os.environ) == names


@pytest.mark.parametrize(
    ("environ", "sent"),
    [
        ({"X": "1", "CONFIG": "c", "RUN_ID": ""}, "X"),
        ({"X": "1", "FORWARD_ENV": "Y,Z"}, "Y Z X"),
        ({"CONFIG": "c"}, None),
    ],
)
def test_a_variable_given_to_the_job_goes_to_the_nodes(
    environ: dict[str, str], sent: str | None
) -> None:
    given = dict(environ)
    resume.forward_given(given, ["CONFIG", "RUN_ID", "X", "OMP_NUM_THREADS", "GONE"])
    assert given.get("FORWARD_ENV") == sent
