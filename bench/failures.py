"""What each launcher does when something goes wrong: `make bench-failures`, or
python bench/failures.py.

Each launcher starts four ranks on this machine, or two nodes with two ranks each on its loopback
address. The table shows:

- the exit code, and how many times the report names rank 2, when rank 2 exits with code 7;
- how long the sleeping ranks of the other node then survive;
- how many ranks are left 10 s after `kill -9` of the launcher;
- how many ranks finish a save that takes 2 s, after SIGTERM to the launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import others
import torch
from fault_steps import CODE, FAULTY
from harness import AGENT, ROOT, TORCHRUN, render, write_section

PROGRAM = str(ROOT / "bench/fault_steps.py")
ENDLESS = str(10**9)  # steps
RANKS = 4
TRIES = 5
START_S = 120.0  # for all ranks to meet
LEFT_S = 10.0  # after which a rank counts as left running
LIMIT_S = 30.0  # how long the ranks of the other node are watched
_NAMED = re.compile(r"FAILED +rank (\d+)|Root Cause.*?rank +: (\d+)", re.DOTALL)


@dataclass(frozen=True)
class Launcher:
    """One launcher: its command for `nproc` ranks on one node, and on node `rank` of two."""

    name: str
    alone: Callable[[], list[str]]
    of_two: Callable[[int, int], list[str]] | None  # node rank, port


class Run:
    """One run of fault_steps.py, on one node or on two; leaves nothing behind."""

    def __init__(self, commands: Sequence[list[str]], *marks: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        for mark in marks:
            (self.folder / mark).touch()
        self.pids: list[int] = []
        self.report = (self.folder / "report").open("w+b")
        self.launchers = [
            subprocess.Popen(
                [*command, PROGRAM, str(self.folder), ENDLESS],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=self.report,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
            for command in commands
        ]

    def __enter__(self) -> Run:
        limit = time.monotonic() + START_S
        while len(list(self.folder.glob("rank_*"))) < RANKS:
            if time.monotonic() > limit:
                report = (self.folder / "report").read_text()
                self.__exit__()
                raise RuntimeError(f"no start:\n{report}")
            time.sleep(0.02)
        time.sleep(0.2)  # by then, each file is complete
        self.pids = [int((self.folder / f"rank_{rank}").read_text()) for rank in range(RANKS)]
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self.launchers:
            with contextlib.suppress(ProcessLookupError):
                launcher.kill()
            launcher.wait()
        self.pids += [int(file.read_text()) for file in self.folder.glob("rank_*")]
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.report.close()
        self._folder.cleanup()

    def leave(self) -> None:
        """Make one rank exit."""
        (self.folder / "fault").write_text("leave")

    def alive(self) -> list[int]:
        """Return the process ids of the ranks that are still alive."""
        return [pid for pid in {*self.pids} if self._is_alive(pid)]

    def _is_alive(self, pid: int) -> bool:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        return bool(command)  # a zombie's is empty

    def code(self) -> int:
        """Wait until the launcher exits; returns its exit code."""
        return self.launchers[0].wait(LIMIT_S + START_S)

    def wait_until_gone(self, pids: Sequence[int], limit_s: float) -> float | None:
        """Return the seconds until these ranks are gone, or None if they are still alive."""
        start = time.monotonic()
        while time.monotonic() < start + limit_s:
            if not set(pids) & set(self.alive()):
                return time.monotonic() - start
            time.sleep(0.02)
        return None


def look(launcher: Launcher) -> list[str]:
    """Return the row of a launcher."""
    codes, named = set(), 0
    for _ in range(TRIES):
        with Run([launcher.alone()]) as run:
            run.leave()
            codes.add(run.code())
            told = (run.folder / "report").read_text(errors="replace")
        found = _NAMED.search(told)
        named += found is not None and str(FAULTY) in found.groups()
    with Run([launcher.alone()], "idle") as run:
        run.launchers[0].kill()
        run.wait_until_gone(run.pids, LEFT_S)
        left = len(run.alive())
    with Run([launcher.alone()], "idle", "saves") as run:
        run.launchers[0].terminate()
        stopped = run.code()
        run.wait_until_gone(run.pids, LEFT_S)
        saved = len(list(run.folder.glob("*.saved")))
        still = len(run.alive())
    return [
        launcher.name,
        ", ".join(map(str, sorted(codes))),
        f"{named} of {TRIES}",
        other_node(launcher),
        f"{left} of {RANKS}",
        f"{saved} of {RANKS}, code {stopped if stopped >= 0 else 128 - stopped}, {still} left",
    ]


def other_node(launcher: Launcher) -> str:
    if launcher.of_two is None:
        return "-"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    commands = [launcher.of_two(node_rank, port) for node_rank in range(2)]
    with Run(commands, "idle") as run:
        assert FAULTY == 2  # it is on the second node
        run.leave()
        seconds = run.wait_until_gone(run.pids[:2], LIMIT_S)
    return f"{seconds:.1f} s" if seconds is not None else f"still running after {LIMIT_S:.0f} s"


def launchers() -> Iterator[Launcher]:
    """Yield every launcher that is installed or can be installed."""

    def of_two(command: list[str]) -> Callable[[int, int], list[str]]:
        def place(node_rank: int, port: int) -> list[str]:
            where = [f"--node-rank={node_rank}", "--master-addr=127.0.0.1", f"--master-port={port}"]
            return [*command, "--nnodes=2", "--nproc-per-node=2", *where]

        return place

    yield Launcher("ours", lambda: [*AGENT, "--nproc-per-node=4"], of_two(AGENT))
    name = f"torchrun {torch.__version__.partition('+')[0]}"
    yield Launcher(name, lambda: [*TORCHRUN, "--nproc-per-node=4"], of_two(TORCHRUN))
    if accelerate := others.find("accelerate", "accelerate"):
        launch = [str(accelerate), "launch", "--multi_gpu", "--mixed_precision=no"]
        launch += ["--dynamo_backend=no", "--num_processes=4"]

        def place(node_rank: int, port: int) -> list[str]:
            where = [f"--machine_rank={node_rank}", "--main_process_ip=127.0.0.1"]
            return [*launch, "--num_machines=2", *where, f"--main_process_port={port}"]

        name = f"accelerate {others.version(accelerate, 'accelerate')}"
        yield Launcher(name, lambda: [*launch, "--num_machines=1"], place)
    if deepspeed := others.find("deepspeed", "deepspeed"):
        name = f"DeepSpeed {others.version(deepspeed, 'deepspeed')}"
        options = ["--num_accelerators", str(RANKS), "--master_port", "29612", "--no_local_rank"]
        yield Launcher(name, lambda: [str(deepspeed), *options], None)


def main() -> None:
    rows = [look(launcher) for launcher in launchers()]
    head = [
        "launcher",
        f"exit code when rank {FAULTY} exits with {CODE}",
        "its report names that rank",
        "time until idle ranks on the other node exit",
        "ranks left after `kill -9` of the launcher",
        "ranks that saved after SIGTERM",
    ]
    remark = "DeepSpeed starts other nodes through pdsh or MPI, which is not measured here."
    write_section("failures", "", render(head, rows), remark)


if __name__ == "__main__":
    main()
