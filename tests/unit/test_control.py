"""A node agent held by a launcher on another machine: beats, signals, and how it tells its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from agents import PROGRAM, Run, kill_what_is_left

from launcher.agent.control import AgentNote, Launched
from launcher.agent.supervisor import Agent, _explain_death, _report_death
from launcher.failure_block import Outcome
from launcher.fanout.protocol import ANSWERS
from launcher.typed_json import encode
from launcher.wire import limits

TOKEN = "t0ken"


class Launcher:
    """The launcher's end of one agent's control stream; it beats until it is closed."""

    def __init__(self, arguments: list[str], **environment: str) -> None:
        theirs, self.stream = os.pipe()
        held = Launched("stdin").variable()
        self.run = Run(arguments, theirs, **held, LAUNCH_TOKEN=TOKEN, **environment)
        os.close(theirs)
        self._is_closed = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._is_closed.wait(limits.BEAT_S):
            self.tell("")

    def tell(self, line: str) -> None:
        os.write(self.stream, f"{line}\n".encode())

    def close(self) -> None:
        self._is_closed.set()
        os.close(self.stream)

    def end(self) -> tuple[Outcome, str]:
        """Wait for the end; return what was told on the last line of stdout, and stderr."""
        err = self.run.finish()
        self.run.assert_gone()
        *shown, last = self.run.output.splitlines()
        assert "" not in shown  # a launcher would show it, behind the node's label
        token, _, message = last.partition(" ")
        assert token == TOKEN and self.run.output.count(TOKEN) == 1
        return ANSWERS.read(message), err


@pytest.mark.slow
def test_a_failure_is_sent_and_not_printed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["--nproc-per-node", "2", str(tmp_path / "program.py"), "raise", "1"]
    launcher = Launcher(words, RUN_ID="r1", LAUNCH_COMMAND="launch 'a b'")
    try:
        end, err = launcher.end()
    finally:
        launcher.close()
        kill_what_is_left([launcher.run])
    assert launcher.run.process.returncode == end.code == 1
    assert end.failure is not None and end.failure.rank == 1
    assert end.failure.cause == "ValueError: batch 120 holds no samples"
    assert (end.run_id, end.command) == ("r1", "")  # it has told no save
    assert "FAILED" not in err


def test_a_question_before_the_ranks_start_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen(["sleep", "600"]) as process:
        agent = Agent(process.pid, ours, -1, 0)
        agent.ask()
        assert capsys.readouterr().err == "node agent: the ranks have not started yet\n"
        theirs.sendall(b"note")
        agent.ask()
        assert process.wait() == -signal.SIGQUIT


@pytest.mark.parametrize("is_out_of_memory", [True, False])
def test_the_kernels_kill_of_an_agent_is_told_from_a_foreign_one(
    is_out_of_memory: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    why = _explain_death(137, [], has_torch=True, is_out_of_memory=is_out_of_memory)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encode(AgentNote("r", 1, time.time(), 2)).encode())
        _report_death(Agent(-1, ours, -1, 0), 137, why, [], left=0)
    err = capsys.readouterr().err
    fault = "out-of-memory" if is_out_of_memory else "agent-killed"
    assert err.lstrip("\n").startswith("FAILED   node agent 1 (") and f"[{fault}]" in err
    assert ("by the kernel" in err) == is_out_of_memory
