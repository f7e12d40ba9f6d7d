"""The links between an agent, its supervisor and a launcher elsewhere (no torch).

Through the control stream, a remote launcher controls a node's part of a run. It sets two
variables for the supervisor:

    LAUNCH_START={json}     a Launched. The supervisor removes it: a run nested within this one has
                            its own stdin.
    LAUNCH_TOKEN=<token>    begins messages to the launcher, `<token> {json}` on stdout: one reports
                            how the run ended, and the launcher prints the failure block.
                            The variable stays: it marks every process of the run.

In a step of a SLURM job there is no control stream, and messages come in short lines, because srun
mixes long ones. The stream carries an empty line as a beat, and the names of signals to forward.
Its end, or silence, means that the launcher is gone: that ends the run on this node.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.stop_signals import QUERY, STOP_SIGNALS
from launcher import processes
from launcher.failure_block import Outcome, print_outcome
from launcher.own_time import OwnTime
from launcher.typed_json import Kinds, encode, in_pieces
from launcher.wire import limits

VARIABLE = "LAUNCH_START"
_BY_NAME = {signum.name.encode(): signum for signum in (*STOP_SIGNALS, QUERY)}


@dataclass(frozen=True)
class Launched:
    """How the supervisor was started; by default by hand."""

    control: str = ""  # "stdin": the control stream; "step": srun started it, and there is none
    has_reaper: bool = False
    record: str = ""  # the run folder where the supervisor is noted

    def variable(self) -> dict[str, str]:
        return {VARIABLE: encode(self)}


@dataclass(frozen=True)
class Membership:
    """The nodes that a run continues with, each by the node rank that it was started with."""

    attempt: int
    nodes: Sequence[int]  # by node rank, and after them the spares


@dataclass(frozen=True)
class Done:
    """This node's part of the run is over; node rank 0 reports how the run ended."""


MESSAGES = Kinds(outcome=Outcome, done=Done, membership=Membership)  # to the launcher


@dataclass(frozen=True)
class Control:
    """The control stream of this process, and the token that begins messages to the launcher."""

    fd: int | None  # None: in a step of a SLURM job
    token: str


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
    """Send this process each signal named on a control stream, to its end."""
    pending = b""
    while hears(fd) and (data := os.read(fd, 4096)):
        *lines, pending = (pending + data).split(b"\n")
        for signum in filter(None, map(_BY_NAME.get, lines)):
            os.kill(os.getpid(), signum)


def hears(fd: int) -> bool:
    """Wait until there is something to read; False after SILENCE_S seconds without."""
    own, heard = OwnTime(), time.monotonic()
    while own.since(heard) <= limits.SILENCE_S:
        if select.select([fd], [], [], limits.BEAT_S)[0]:
            return True
    return False


def await_client(pid: int) -> None:
    """Wait for the end of a process whose child this should be."""
    started = processes.start_ticks(pid)
    while started is not None and processes.start_ticks(pid) == started:
        time.sleep(limits.CLIENT_LOOK_S)


def take_stdin(token: str) -> Control:
    """Take the control stream away from stdin."""
    fd = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return Control(fd, token)


def report_outcome(
    outcome: Outcome, control: Control | None, *, is_line_open: bool, folder: Path | None = None
) -> None:
    """Print how the run ended, and keep it in `folder`; a launcher elsewhere is sent it.

    If `is_line_open`, the last line shown may lack its end; the block begins a line.
    """
    if control is None:
        if is_line_open and outcome.code != 0:
            print(file=sys.stderr)
        print_outcome(outcome, sys.stderr, folder)
        return
    tell(outcome, control, is_line_open=is_line_open)


def tell(message: Outcome | Done | Membership, control: Control, *, is_line_open: bool) -> None:
    """Send a message to the launcher."""
    # A launcher over ssh finds it within a line, too; one more end would be a line of its own.
    line_end = "\n" if is_line_open and control.fd is None else ""
    with contextlib.suppress(OSError):  # nobody reads any more
        text = MESSAGES.write(message)
        pieces = [text] if control.fd is not None else in_pieces(text)
        lines = [f"{control.token} {piece}\n" for piece in pieces]
        print(line_end + "".join(lines), end="", flush=True)
