"""Start node agents under test, and track every process that descends from them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher import processes

ROOT = Path(__file__).resolve().parents[2]
GLOO_SAYS = re.compile(r"^\[Gloo\] Rank .*\n", re.M)  # on stdout, in some versions of torch
AGENT = [sys.executable, str(ROOT / "scripts/lib/agent.py")]
LOOPS = str(ROOT / "tests/unit/own_loops.py")
PROMISED_S = 2.0  # from the kill of one process to the end of all; `make prove` checks it
PATIENCE_S = 900.0  # only ends a test that hangs: an idle machine needs less than a tenth of it
SECRET = "the same for all agents"
WINGS = ("launcher", "distributed", "training", "scripts")
MODULES = [ROOT / "train.py", *(file for wing in WINGS for file in (ROOT / wing).rglob("*.py"))]

# Rank 1 fails. Rank 0 handles SIGTERM: it saves for longer than other ranks have between SIGTERM
# and SIGKILL, or only sets a flag.
SAVES_ON_SIGTERM = """
import os, signal, sys, time
import torch.distributed as dist

def save(*_):
    with open("emergency", "w") as file:
        for _ in range(25):
            print("part", file=file, flush=True)
            time.sleep(0.1)
        print("whole", file=file)
    os._exit(3)

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    how = {"save": save, "flag": lambda *_: None}[sys.argv[1]]
    signal.signal(signal.SIGTERM, how)
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("bad")
time.sleep(600)
"""

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist

what, who = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
if os.fork() == 0:  # a child of the rank's own, as a data worker is
    time.sleep(600)
dist.barrier()
print(f"ready {rank}", flush=True)
dist.barrier()  # every rank has said so before any of them does anything
if rank == who:
    if what == "raise":
        raise ValueError("batch 120 holds no samples")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
if what == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(f"armed {rank}", flush=True)
if what == "save":
    stop = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, lambda *_: stop.append(1))
    print(f"armed {rank}", flush=True)
    while not stop:
        time.sleep(0.01)
    time.sleep(0.5)
    sys.path.append(os.environ["KIT"])
    from distributed.heartbeat import beat
    beat(saved=1)
    print(f"saved {rank}", flush=True)
    sys.exit(75)
if os.environ.get("BUSY"):
    while True:
        dist.all_reduce(torch.ones(1000))
print(f"asleep {rank}", flush=True)
time.sleep(600)
"""


def children(pid: int) -> list[int]:
    """Return the children of a process, as the kernel lists them."""
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


class Run:
    """One agent under test, and all its descendants."""

    def __init__(
        self,
        arguments: Sequence[str],
        stdin: int | None = None,
        through: Sequence[str] = (),
        /,
        **environment: str,
    ) -> None:
        """Start the agent; `through` is a command that turns into the agent, such as prlimit."""
        own = {"PYTHONPATH": "", "RUN_SECRET": SECRET, "KIT": str(ROOT), **environment}
        self.process = subprocess.Popen(
            [*through, *AGENT, *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **own},
        )
        self.seen: set[int] = {self.process.pid}
        self.output = ""

    def wait_for(self, *texts: str) -> None:
        """Read the ranks' output until each text has appeared."""
        assert self.process.stdout is not None and self.process.stderr is not None
        while not all(text in self.output for text in texts):
            line = self.process.stdout.readline()
            assert line, f"ended before {texts}: {self.output}\n{self.process.stderr.read()}"
            self.output += line
        self.look()

    def look(self) -> None:
        self.seen |= set(processes.descendants(self.process.pid))

    def agent_pid(self) -> int:
        """The agent proper: the supervisor's only child."""
        return children(self.process.pid)[0]

    def rank_pids(self) -> list[int]:
        return children(self.agent_pid())

    def finish(self) -> str:
        """Wait until the agent exits; returns stderr."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        self.output += out
        return err

    def survivors(self) -> list[int]:
        return [pid for pid in self.seen if is_alive(pid)]

    def assert_gone(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (left := self.survivors()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left == []


def world(port: int, node: int, *, nodes: int = 2, nproc: int = 1) -> list[str]:
    """Return an agent's options for one of several nodes on loopback."""
    sizes = [f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={nproc}"]
    return [*sizes, "--master-addr=127.0.0.1", f"--master-port={port}"]


def execute(
    folder: Path, *command: object, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder to its end, and check its exit code."""
    done = run_program(command, folder, **{"PYTHON": sys.executable, **environment})
    assert done.returncode == code, done.stdout + done.stderr
    return done


def written(file: Path, text: str) -> Path:
    """Write a file; returns it."""
    file.write_text(text)
    return file


def with_limits(folder: Path, **limits_s: float) -> dict[str, str]:
    """Return variables that change limits of the launcher in each Python that starts with them."""
    lines = ["import sys", f"sys.path.insert(0, {str(ROOT)!r})"]
    lines += ["from launcher.wire import limits", "del sys.path[0]"]
    lines += [f"limits.{name} = {limit_s}" for name, limit_s in limits_s.items()]
    folder.mkdir()
    written(folder / "sitecustomize.py", "\n".join(lines))
    return {"PYTHONPATH": str(folder)}


def rarely(*cases: object) -> list[Any]:
    """Return these cases only in `make prove`; `make test` has other cases of the same kind."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.long)
        for one in cases
    ]


def is_alive(pid: int) -> bool:
    return processes.start_ticks(pid) is not None


def kill_what_is_left(runs: Iterable[Run]) -> None:
    """Clean up after a test, whatever its outcome: end only what these runs started."""
    for run in runs:
        run.look()
        processes.send(run.survivors(), signal.SIGKILL)
        run.process.wait()


def run_program(
    command: Sequence[object], folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, in a folder, with these additional variables."""
    return subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def run_agent(
    *words: object, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return run_program([*AGENT, *words], folder, **environment)


@contextlib.contextmanager
def begun(code: str, *words: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run Python code that prints a line when it is ready; kill it when the body ends."""
    command, pipe = [sys.executable, "-c", code, *map(str, words)], subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, **options
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def eventually(is_so: Callable[[], object], what: str = "") -> None:
    """Wait until `is_so` returns a true value."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
