"""What a PBS job was given, from texts of a real OpenPBS; tests/cluster/pbs/ has them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from job_tools import make_tool

from distributed.errors import Refused
from distributed.job import job_start, this_job
from distributed.lock import RunLock
from launcher.plan import pbs
from launcher.plan.plan import ROOT
from launcher.plan.typed import Choices
from launcher.record import run_json
from launcher.record.run_ids import next_run_id

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
        ("2:ngpus=4", "n1 n1 n2", {"n1": 2, "n2": 1}, False),  # not the request of these lines
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
    """The text that qstat shows; without it, qstat does not answer."""
    make_tool(tools / "qstat", f"cat {tmp_path}/told")
    return tmp_path / "told"


def tell(qstat: Path, text: str) -> None:
    """Have qstat show a text from now on, as to another launch."""
    qstat.write_text(text)
    pbs.ask_qstat.cache_clear()


def note(qstat: Path, text: str) -> None:
    """Be another launch of this job, to which qstat shows a text."""
    tell(qstat, text)
    pbs.note_job(os.environ)


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
    be_in_job("26.head")
    monkeypatch.setattr(os, "getsid", lambda _: 1)
    note(qstat, first)
    run_json.note_start(tmp_path / "26.head", os.environ)
    monkeypatch.setattr(os, "getsid", lambda _: session)
    note(qstat, later)
    asked = Choices(environ=os.environ, is_dry_run=True)
    assert next_run_id(tmp_path, "26.head", asked) == run_id
    assert job_start(os.environ) == (1 if "run_count = 2" in later else 0)


def test_a_job_of_torque_is_known_by_its_own_names(qstat: Path) -> None:
    be_in_job("7.head")
    tell(qstat, TORQUE)
    assert pbs.note_job(os.environ) == []
    when = "Thu Nov 26 08:40:51 2026"
    this = {"job": "7.head", "run_id": "7.head", "start": 0, "cluster": "head", "submitted": when}
    assert this_job(os.environ) == this == json.loads(os.environ["LAUNCH_JOB"])


@pytest.mark.parametrize(
    ("run", "later", "is_refused"),
    [
        ("26.head", FIRST, False),
        ("26.head", told("qstat-xf-requeued"), False),
        ("26.head", "", False),
        # The server was installed again.
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
    note(qstat, FIRST)
    RunLock(tmp_path / run, f"run {run}").close()
    note(qstat, later)
    cause = r"another job of the same id \(cluster head, submitted Thu Nov 26 08:.*foreign-run\]"
    refusal = pytest.raises(Refused, match=cause) if is_refused else contextlib.nullcontext()
    with refusal:
        RunLock(tmp_path / run, f"run {run}").close()


def test_a_job_that_was_started_again_takes_over_from_a_live_start(
    tmp_path: Path, qstat: Path
) -> None:
    be_in_job("26.head")
    note(qstat, FIRST)
    (tmp_path / "26.head").mkdir()
    first = RunLock(tmp_path / "26.head", "run")
    note(qstat, told("qstat-xf-requeued"))
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
def test_what_qsub_v_has_set(qstat: Path, name: str, names: list[str]) -> None:
    be_in_job("1.head")
    tell(qstat, told(name))
    assert pbs.note_job(os.environ) == names
