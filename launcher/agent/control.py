"""The links between an agent, its supervisor and a launcher elsewhere (no torch).

Through the control stream, a remote launcher controls a node's part of a run: launcher_link.py has
what goes over it. Whoever starts a supervisor sets two variables:

    LAUNCH_START=local|step the launcher on this machine has become it, or srun started it. The
                            supervisor removes it: a run nested within this one is another's.
    LAUNCH_TOKEN=<token>    marks every process of the run, and begins messages to the launcher.
                            One reports how the run ended: the launcher prints the failure block.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distributed.stop_signals import QUERY, stop_signals
from launcher import processes
from launcher.failure_block import print_outcome
from launcher.outcome import Outcome
from launcher.typed_json import encode
from launcher.wire import launcher_link, limits
from launcher.wire.messages import StopRequest


@dataclass(frozen=True)
class Control:
    """The connection to a launcher elsewhere."""

    fd: int | None  # the control stream; None: in a step of a SLURM job, which has none
    mark: str  # begins messages to the launcher (launcher_link.py)

    def tell(self, message: object, *, is_line_open: bool = False) -> None:
        """Send the launcher a message. Where `is_line_open`, the last line lacks its end."""
        # srun would mix so long a line with another node's.
        launcher_link.tell(self.mark, message, begins_line=is_line_open and self.fd is None)


@dataclass(frozen=True)
class AgentNote:
    """What the agent sends the supervisor once the run has begun."""

    run_id: str
    node_rank: int
    started: float  # seconds since the epoch
    ranks: int  # on this node
    folder: str = ""  # of the run, where this node writes run.json
    command: str = ""  # that resumes it; empty if nothing does


@dataclass(frozen=True)
class SupervisorLink:
    """What the agent holds of its supervisor; no rank does."""

    socket: socket.socket  # for the note; its other end closes when the supervisor dies
    control: Control | None  # the connection to a launcher elsewhere, if there is one
    reaper: int | None  # tells the reaper of the agent's end
    words: int  # a file for what the agent says last (supervisor.py)

    def tell(self, note: AgentNote) -> None:
        self.socket.sendall(encode(note).encode())

    def close(self) -> None:
        """In a rank, let go of all."""
        self.socket.close()
        close(self.reaper)
        os.close(self.words)


def close(fd: int | None) -> None:
    """Close a descriptor, where there is one."""
    if fd is not None:
        os.close(fd)


def end_after(wait: Callable[[int], None], which: int, kill_agent: Callable[[], None]) -> None:
    """In a thread, wait for the end of a launcher or client, and then end the run."""

    def follow() -> None:
        wait(which)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(limits.CONTROL_TERM_S)
        kill_agent()

    threading.Thread(target=follow, daemon=True).start()


def follow_stream(fd: int) -> None:
    """Send this process each signal that the launcher passes on, to the stream's end."""
    while (request := launcher_link.read_request(fd)) is not None:
        if isinstance(request, StopRequest) and request.signum in (*stop_signals(), QUERY):
            os.kill(os.getpid(), request.signum)


def await_client(pid: int) -> None:
    """Wait for the end of a process whose child this should be."""
    started = processes.start_ticks(pid)
    while started is not None and processes.start_ticks(pid) == started:
        time.sleep(limits.CLIENT_LOOK_S)


def take_stdin(mark: str) -> Control:
    """Take the control stream away from stdin."""
    fd = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return Control(fd, mark)


def report_outcome(
    outcome: Outcome, control: Control | None, *, is_line_open: bool, folder: Path | None = None
) -> None:
    """Print how the run ended, and keep it in `folder`; a launcher elsewhere is sent it.

    If `is_line_open`, the last line shown may lack its end; the block begins a line.
    """
    if control is not None:
        control.tell(outcome, is_line_open=is_line_open)
        return
    if is_line_open and outcome.code != 0:
        print(file=sys.stderr)
    print_outcome(outcome, sys.stderr, folder)
