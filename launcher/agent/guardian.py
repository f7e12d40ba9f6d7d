"""The node agent, one per node: `python -m distributed.run`, with torchrun's own arguments.

    python -m distributed.run --nproc-per-node 4 train.py --config config/local3.yaml

Two processes do the work. The guardian, this one, needs no torch: it passes signals on, and when
the agent ends, however it ends, it ends whatever is left below it. The agent (agent.py) imports
torch once and forks the ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.stop_signals import handled_signals
from launcher import messages, processes
from launcher.agent.control import Control, report_end, take_control
from launcher.failure import Failure
from launcher.failure_block import End, RunSummary
from launcher.record import run_json


@dataclass(frozen=True)
class AgentNote:
    """What the agent tells the guardian once the run has begun."""

    run_id: str
    node_rank: int
    started: float  # seconds since the epoch
    ranks: int  # on this node
    folder: str = ""  # of the run, where this node writes run.json


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent below a guardian; returns the exit code. A rank leaves by SystemExit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    processes.open_closed_streams()
    recorded = os.environ.pop("RUN_RECORD", "")  # the run folder where this process is noted
    processes.adopt_orphans()
    control = take_control()
    ours, theirs = socket.socketpair()
    me = os.getpid()
    handled = handled_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*handled, signal.SIGCHLD})
    agent = os.fork()
    if agent != 0:
        theirs.close()
        code = _guard(agent, ours, handled, control)
        if recorded:  # the run may have ended before it began
            run_json.note_end(Path(recorded), code)
        return code
    ours.close()
    if control is not None:
        os.close(control.fd)
    os.setsid()  # a terminal's Ctrl-C reaches the guardian alone
    processes.die_with_parent(me)
    for signum in handled:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*handled, signal.SIGCHLD})
    if os.environ.get("ENGINE") == "torch.distributed.launch":
        from torch.distributed.launch import main as launch  # its ranks, its report

        launch(list(arguments))  # type: ignore[no-untyped-call]
        return 0
    from launcher.agent.agent import run_agent  # imports torch

    return run_agent(list(arguments), theirs, control)


def _guard(
    agent: int, notes: socket.socket, handled: Sequence[signal.Signals], control: Control | None
) -> int:
    """Wait for the agent's end, then end what is left below; returns the agent's exit code.

    Signals are blocked and taken one by one: a handler could run within another.
    """
    passed_on: list[int] = []

    def kill_agent() -> None:
        passed_on.append(signal.SIGKILL)
        processes.send([agent], signal.SIGKILL)

    if control is not None:
        control.follow(kill_agent)
    while (waited := os.waitpid(agent, os.WNOHANG)) == (0, 0):
        signum = signal.sigwait({*handled, signal.SIGCHLD})
        if signum != signal.SIGCHLD:
            passed_on.append(signum)
            processes.send([agent], signum)
    status = waited[1]
    left = processes.end_descendants()
    code = processes.exit_code(status)
    if os.WIFSIGNALED(status):
        note = _read_note(notes)
        if note.folder:
            run_json.note_end(Path(note.folder), code, agent=agent)
        is_asked = os.WTERMSIG(status) in passed_on
        _report_death(code, note, control, left=len(left), is_asked=is_asked)
    return code


def _report_death(
    code: int, note: AgentNote, control: Control | None, *, left: int, is_asked: bool
) -> None:
    """Tell in the agent's place how the run ended: the agent was killed, or stopped too early."""
    failure = Failure(
        fault="agent-killed",
        cause=f"{signal.Signals(code - 128).name} to the node agent, from outside this run",
        code=code,
        host=socket.gethostname(),
        node_rank=note.node_rank,
        time=time.time(),
    )
    summary = RunSummary(
        started=note.started,
        lost_peer=0,
        stopped=note.ranks,
        left=left,
        run_id=note.run_id,
        command=os.environ.get("LAUNCH_COMMAND", "") if note.run_id else "",
    )
    end = End(code, None if is_asked else failure, summary, is_told=False)
    is_silent = is_asked and code == 128 + signal.SIGKILL  # the launcher is gone
    if not is_silent:
        report_end(end, control, is_line_open=True)


def _read_note(notes: socket.socket) -> AgentNote:
    notes.setblocking(False)
    try:
        return messages.parse(AgentNote, notes.recv(65536))
    except (OSError, ValueError):  # the agent ended before the run had begun
        return AgentNote(os.environ.get("RUN_ID", ""), 0, time.time(), 0)
