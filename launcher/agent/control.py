"""The links between an agent, its supervisor and a remote launcher (no torch).

A remote launcher controls a node's part of a run through the control stream; launcher_link.py
describes its messages. The program that starts a supervisor sets two variables:

    LAUNCH_START=local      the local launcher became the supervisor. The supervisor removes this
                            variable, so that nested runs do not inherit it.
    LAUNCH_TOKEN=<token>    marks every process of the run, and begins each message to the launcher.
                            The launcher prints the failure block from one of them, the outcome.
"""

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distributed.stop_signals import QUERY, handled_signals, notices, stop_signals
from launcher import processes
from launcher.failure_block import print_outcome
from launcher.outcome import Outcome
from launcher.typed_json import encode
from launcher.wire import launcher_link, limits
from launcher.wire.messages import StopRequest


@dataclass(frozen=True)
class Control:
    """The connection to a remote launcher."""

    fd: int  # the control stream
    mark: str  # the prefix of messages to the launcher (launcher_link.py)
    is_step: bool  # both are srun's: the stream has no signs of life, and ends with the launcher

    def send(self, message: object, *, is_line_open: bool = False) -> None:
        """Send the launcher a message. `is_line_open` means that the last line has no newline."""
        # Under srun, first end that line: srun would mix a longer line with another node's.
        launcher_link.send_message(self.mark, message, begins_line=is_line_open and self.is_step)


@dataclass(frozen=True)
class AgentNote:
    """What the agent sends the supervisor once the run has begun."""

    run_id: str
    node_rank: int
    started: float  # seconds since the epoch
    ranks: int  # on this node
    folder: Path | None = None  # of the run, if this node writes run.json
    command: str = ""  # that resumes the run; empty if there is none


@dataclass(frozen=True)
class SupervisorLink:
    """The agent's connections to its supervisor; ranks do not have them."""

    socket: socket.socket  # for the note; its other end closes when the supervisor dies
    control: Control | None  # the connection to a remote launcher, if there is one
    reaper: int | None  # closes when the agent exits, which the reaper notices
    words: int  # a file for the agent's last output (supervisor.py)

    def send(self, note: AgentNote) -> None:
        self.socket.sendall(encode(note).encode())

    def close(self) -> None:
        """Close what a rank inherited from the agent; called in each rank."""
        self.socket.close()
        close(self.reaper)
        os.close(self.words)


def close(fd: int | None) -> None:
    """Close a descriptor, if there is one."""
    if fd is not None:
        os.close(fd)


def end_run_after(wait: Callable[[int], None], which: int, kill_agent: Callable[[], None]) -> None:
    """In a thread, wait until a launcher or client is gone, and then end the run.

    `wait(which)` returns when it is gone; `which` is a descriptor or a process id. This process
    gets SIGTERM, which it forwards to the agent. CONTROL_TERM_S later, the agent is killed.
    """

    def follow() -> None:
        wait(which)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(limits.CONTROL_TERM_S)
        kill_agent()

    threading.Thread(target=follow, daemon=True).start()


def follow_stream(control: Control, silence_s: float) -> None:
    """Send this process each signal that the launcher forwards, until the stream ends.

    It also ends if an ssh launcher sends nothing for `silence_s` seconds.
    """
    silence_s = math.inf if control.is_step else silence_s
    number = int(control.mark.rpartition(".")[2])
    while (request := launcher_link.read_request(control.fd, silence_s)) is not None:
        is_ours = isinstance(request, StopRequest) and request.node in (-1, number)
        if is_ours and request.signum in (*stop_signals(), QUERY):
            os.kill(os.getpid(), request.signum)


def await_client(pid: int) -> None:
    """Wait for the podman client to exit; this process is not its child, but should end with it."""
    started = processes.start_ticks(pid)
    while started is not None and processes.start_ticks(pid) == started:
        time.sleep(limits.LOOK_S)


def move_control_off_stdin(mark: str, *, is_step: bool) -> Control:
    """Move the control stream from stdin, which becomes /dev/null, to another descriptor."""
    fd = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return Control(fd, mark, is_step)


def report_outcome(
    outcome: Outcome, control: Control | None, *, is_line_open: bool, folder: Path | None
) -> None:
    """Report how the run ended to a remote launcher; without one, print it.

    The text, if there is any, is also kept in `folder`, the run's. `is_line_open` means that the
    last line shown may have no newline; the failure block begins a new one.
    """
    if control:
        control.send(outcome, is_line_open=is_line_open)
        return
    if is_line_open and outcome.code != 0:  # nothing is printed for code 0
        print(file=sys.stderr)
    print_outcome(outcome, sys.stderr, folder)


def collect_signals() -> list[int]:
    """Handle stop signals by adding them to the list returned, until an attempt handles them.

    Also unblocks the notices: until now, there was no handler, and one would have ended this
    process. Signals that this process ignores, as under nohup, stay ignored.
    """
    came = list[int]()
    for signum in handled_signals():
        signal.signal(signum, lambda received, _: came.append(received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, notices())
    return came
