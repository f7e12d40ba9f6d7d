"""Ctrl-Z in a terminal stops all of a run on one machine, and `fg` continues it."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agents import PATIENCE_S, ROOT

from launcher import processes

pytestmark = pytest.mark.slow
COUNT = """
import time
number = 0
while True:
    number += 1
    print("at", number, flush=True)
    time.sleep(0.01)
"""


class Shell:
    """A bash with job control, at a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "-i"], {**os.environ, "PS1": "$ "})
        self.shown = ""

    def type(self, text: str) -> None:
        self.shown = ""
        os.write(self.terminal, text.encode())

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.shown):
            assert time.monotonic() < deadline, self.shown
            self.shown += os.read(self.terminal, 65536).decode(errors="replace")

    def close(self) -> None:
        processes.send(processes.descendants(self.pid), signal.SIGKILL)
        processes.send([self.pid], signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.terminal)


def test_it_stops_every_process_and_fg_continues_them(tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text(COUNT)
    shell = Shell(tmp_path)
    try:
        words = [f"{ROOT}/scripts/launch.sh", "--nproc-per-node", "2", "count.py"]
        shell.type(f"PYTHON={shlex.quote(sys.executable)} {shlex.join(words)}\n")
        shell.wait_for(r"at \d+")
        for _ in range(2):
            shell.type("\x1a")
            shell.wait_for("Stopped")
            (supervisor,) = (
                pid for pid in processes.descendants(shell.pid) if is_child(pid, shell)
            )
            below = processes.descendants(supervisor)
            assert len(below) == 3  # the agent and two ranks
            assert all(map(processes.is_stopped, [supervisor, *below]))
            shell.type("fg\n")
            shell.wait_for(r"at \d+\s[\s\S]*at \d+\s")
        shell.type("\x03")
        shell.wait_for(r"stopped  by SIGINT: ranks 0-1 ended by SIGINT \(code 130\)")
    finally:
        shell.close()


def is_child(pid: int, shell: Shell) -> bool:
    return int(processes.read_stat(pid)[1]) == shell.pid


def test_a_run_that_no_shell_could_continue_does_not_stop(tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text(COUNT)
    words = [f"{ROOT}/scripts/launch.sh", "--nproc-per-node", "1", "count.py"]
    with subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHON": sys.executable},
    ) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.send_signal(signal.SIGTSTP)
        for _ in range(100):  # more than the pipe and the agent keep
            assert run.stdout.readline().startswith("at ")
        run.send_signal(signal.SIGTERM)
        run.stdout.read()
    assert run.returncode == 143
