"""What other programs print are bytes: job names, paths and process names need not be UTF-8."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from job_tools import job_plan, make_tool
from torch.distributed import HashStore  # type: ignore[attr-defined]

from distributed import environment, rendezvous
from distributed.job import ask_scheduler
from launcher import master_port, processes, shared_files
from launcher.plan import hosts, pbs, submit_with_config
from launcher.plan.plan import ROOT
from launcher.preflight.gpus import visible_gpus
from launcher.record.commit import git_commit

LATIN = b"J\xfcrgen"  # not UTF-8
NAME = os.fsdecode(LATIN)
CUT = "a训练训练训".encode()[:15]  # the kernel cuts a process's name to 15 bytes


def answer(tools: Path, name: str, text: bytes, code: int = 0) -> None:
    """Make a tool that prints these bytes to both streams."""
    file = tools / f"{name}.txt"
    file.write_bytes(text)
    make_tool(tools / name, f"cat {file} >&2; cat {file}; exit {code}")


def test_qstat_folds_within_a_character(tools: Path) -> None:
    answer(tools, "qstat", (ROOT / "tests/cluster/pbs/qstat-xf-utf8-folded.txt").read_bytes())
    told = pbs.ask_qstat("66.head")["Submit_arguments"]
    assert told.endswith("并且包含山水花鸟四种意象") and told.isprintable()


@pytest.mark.parametrize("tool", ["squeue", "sinfo", "scontrol", "qstat"])
def test_what_a_scheduler_prints_keeps_its_bytes(tools: Path, tool: str) -> None:
    answer(tools, tool, b"a " + LATIN + b"\n")
    assert os.fsencode(ask_scheduler(tool) or "") == b"a J\xfcrgen\n"


def test_a_job_of_pbs_with_bytes_in_its_name(tools: Path) -> None:
    answer(tools, "qstat", b"Job Id: 7.head\n    Job_Name = " + LATIN + b"\n    run_count = 1\n")
    assert pbs.ask_qstat("7.head") == {"Job_Name": NAME, "run_count": "1"}


def test_sinfo_and_sbatch(tools: Path) -> None:
    answer(tools, "sinfo", b"gpu* " + LATIN + b" gpu:8\n")
    assert submit_with_config.gpus_of_nodes("") == [8]
    answer(tools, "sbatch", b"sbatch: no " + LATIN + b"\n", 1)
    assert submit_with_config.refusal(["x.sh"]) == "sbatch: no J�rgen"


def test_nvidia_smi(tools: Path) -> None:
    answer(tools, "gpus", b"0, GPU-aa, 0, 580.1, [N/A]\n")
    answer(tools, "users", b"GPU-aa, 42, /home/" + LATIN + b"/python\n")
    kind = f'case "$1" in --query-gpu=*) cat {tools}/gpus.txt ;; *) cat {tools}/users.txt ;; esac'
    make_tool(tools / "nvidia-smi", kind)
    assert [gpu.processes for gpu in visible_gpus({})] == [("pid 42 (/home/J�rgen/python)",)]


def test_git(tools: Path) -> None:
    make_tool(tools / "git", r"printf 'fatal: not owned by J\374rgen' >&2; exit 128")
    assert git_commit() is None


def test_a_program_in_a_container(tmp_path: Path) -> None:
    command = ["printf", "%s", LATIN]
    found = job_plan(tmp_path).run_inside(command, stdout=subprocess.PIPE)  # type: ignore[arg-type]
    assert found.stdout == "J�rgen"


def test_a_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: NAME)
    env = environment.detect({})
    assert rendezvous._check_in(HashStore(), env, torch.device("cpu"), owns_gpu=False) is None


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[int]:
    """The id of a process whose name is cut within a character, and that maps an odd file."""
    lines = (
        "import mmap, sys",
        f"open('/proc/self/comm', 'wb').write({CUT!r})",
        f"file = open({os.fsencode(tmp_path) + b'/' + LATIN!r}, 'w+b')",
        "file.write(b'x' * 4096), file.flush()",
        "kept = mmap.mmap(file.fileno(), 4096)",
        "print(flush=True), sys.stdin.read()",
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdin=pipe, stdout=pipe) as one:
        assert one.stdout is not None and one.stdout.readline() == b"\n"
        yield one.pid
        assert one.stdin is not None
        one.stdin.close()


def test_processes(odd: int) -> None:
    assert not processes.handles(odd, 10)
    assert shared_files._writable_parts(odd)


def test_the_leader_of_a_process_group(odd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpgrp", lambda: odd)
    assert environment._starter() == f"process {os.getpid()}"


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_bytes(b"n1 # of " + LATIN + b"\nn2\n")
    assert hosts.read_hostfile(tmp_path / "hosts") == ["n1", "n2"]
    monkeypatch.setattr(master_port, "Path", lambda _: tmp_path / "hosts")
    (tmp_path / "hosts").write_bytes(b"# of " + LATIN + b"\n127.0.1.1 n1\n")
    assert master_port.hosts_line("n1") == 2
    (tmp_path / "nodes").write_bytes(LATIN + b"\n")
    assert pbs.read_lines({"PBS_NODEFILE": str(tmp_path / "nodes")}) == [NAME]


def test_a_batch_file(tmp_path: Path, tools: Path) -> None:
    answer(tools, "qsub", b"pbs_version = 23.06 " + LATIN)
    file = tmp_path / "own.pbs"
    file.write_bytes(
        b"#!/bin/bash\n# of " + LATIN + b"\n#PBS -N " + LATIN + b"\n#PBS -l select=2\n"
    )
    assert hosts.read_batch_script(file, None).num_nodes == 2
    assert pbs.job_command({}, file, ["x"])[:4] == ["qsub", "-V", "-N", NAME]


def test_a_stream_that_rejects_bytes() -> None:
    lines = "import os, launcher.text as text; text.mend_streams(); print(os.fsdecode(b'J\\xfc'))"
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8:strict", "PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", lines], env=environ) == b"J\\udcfc\n"
