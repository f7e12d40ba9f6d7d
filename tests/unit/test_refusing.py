"""Systems that refuse what a run can do without: it trains, and one warning names the loss."""

import os
import platform
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import refusing
from agents import PATIENCE_S, ROOT, rarely, written

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != refusing.MACHINE, reason="other system call numbers"),
]

SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), flush=True)
"""
SINGLE = "ssh/launch_singlenode.sh"
LINKS = "symlink=EPERM,symlinkat=EPERM"
NO_LINKS = "no symbolic links here (Operation not permitted): names such as latest are not updated"
OFD_LOCKS = "fcntl:37=EINVAL,fcntl:38=EINVAL"
NO_LOCKS = "this file system has no locks"
NO_SETSID = "this system refuses setsid(2); a script that reads from the terminal is stopped"
NO_PRCTL = "this system refuses prctl(2); if a process of the run is killed, the others may end"


def launch(
    calls: str, folder: Path, script: str, *words: str, terminal: int = -1, **variables: str
) -> tuple[int, str, str]:
    """Launch with the system calls refused. Returns the exit code and what was printed.

    If there is a terminal, it is stdin and stdout.
    """
    refuse = [sys.executable, str(Path(refusing.__file__)), calls]
    command = [*refuse, str(ROOT / "scripts" / script), *words]
    environ = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL if terminal < 0 else terminal,
        stdout=subprocess.PIPE if terminal < 0 else terminal,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stdout or "", done.stderr


@pytest.mark.parametrize(
    ("calls", "warnings"),
    [
        (f"{LINKS},{OFD_LOCKS}", [NO_LINKS, NO_LOCKS]),
        ("memfd_create=ENOSYS,prctl:36=EINVAL,prctl:1=EPERM", [NO_PRCTL]),
        (f"ioctl:{0x8915}=ENOTTY,sched_getaffinity=ENOSYS", []),  # SIOCGIFADDR
        ("setsid=EPERM,setitimer=ENOSYS,sigaltstack=EPERM", []),
        ("statfs=ENOSYS", [f"the check of the {what} failed (" for what in ("limits", "folders")]),
        *rarely(
            ("symlink=ENOSYS,symlinkat=ENOSYS", ["no symbolic links here (Function not impl"]),
            ("fcntl:37=ENOLCK,fcntl:38=ENOLCK,fcntl:6=ENOLCK", [NO_LOCKS]),
            ("memfd_create=EPERM", []),
            ("prlimit64=EPERM", ["the check of the limits failed"]),
            ("tgkill=ENOSYS,setpriority=EPERM,clock_gettime:7=EINVAL", []),
        ),
    ],
)
def test_what_is_refused_is_done_without(calls: str, warnings: list[str], tmp_path: Path) -> None:
    written(tmp_path / "sum.py", SUM)
    code, out, err = launch(calls, tmp_path, "launch.sh", "--nproc-per-node", "2", "sum.py")
    assert (code, out) == (0, "sum 2\n"), err
    told = [line for line in err.splitlines() if "warning: " in line]
    assert len(told) == len(warnings), err
    assert all(words in err for words in warnings), err


def test_a_terminal_whose_calls_are_refused_is_used_like_a_pipe(tmp_path: Path) -> None:
    written(tmp_path / "sum.py", SUM)
    refused, words = (
        f"ioctl:{0x5402}=EPERM,setsid=EPERM",
        ("--nproc-per-node", "2", "sum.py"),
    )  # TCSETS
    reader, terminal = pty.openpty()
    code, _, err = launch(refused, tmp_path, "launch.sh", *words, terminal=terminal)
    os.close(terminal)
    assert (code, os.read(reader, 4096)) == (0, b"sum 2\r\n"), err
    os.close(reader)
    told = [line for line in err.splitlines() if "warning: " in line]
    assert told == [f"node agent: warning: {NO_SETSID}"]


def test_training_saves_and_resumes_without_links_locks_and_flushes(tmp_path: Path) -> None:
    refused = f"{LINKS},{OFD_LOCKS},fsync=EINVAL,fadvise64=ENOSYS,setpriority=EPERM"
    small = ["train.eval_every=0", "train.global_batch_size=12", "model.layers=1", "model.width=16"]
    every = ["checkpoint.every=2", "checkpoint.snapshot_every=1"]
    for steps in (4, 6):
        words = [str(ROOT / "config/local3.yaml"), "2", f"train.max_steps={steps}", *small, *every]
        code, out, err = launch(refused, tmp_path, SINGLE, *words, RUN_ID="here")
        assert code == 0 and "Traceback" not in err, err
        told = [line for line in err.splitlines() if line.startswith("warning: ")]
        assert len(told) == len({*told}) == 5, err  # each loss once, in each folder
        assert sum(NO_LINKS in line for line in told) == 2  # logs, checkpoints
        assert sum(NO_LOCKS in line for line in told) == 2
        flush = "warning: files cannot be flushed (Invalid argument); a power failure may damage"
        assert any(line.startswith(flush) for line in told)
    assert "resumed    after step 4" in out
    assert (tmp_path / "checkpoints/here/step-6").is_dir()
    assert not (tmp_path / "checkpoints/here/latest").exists()
