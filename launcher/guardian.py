"""The node agent, one per node: `python -m distributed.run`, with torchrun's own arguments.

    python -m distributed.run --nproc-per-node 4 train.py --config config/local3.yaml

Two processes do the work. The guardian, this one, needs no torch: it passes signals on, and when
the agent ends, however it ends, it ends whatever is left below it. The agent (launcher/agent.py)
imports torch once and forks the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from launcher import processes
from launcher.control import Control, report_end, take_control
from launcher.failure import End, Failure, RunSummary

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent below a guardian; returns the exit code (in a rank: that of its program)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # a stream that the caller has closed
        pass
    os.close(fd)
    processes.adopt_orphans()
    control = take_control()
    ours, theirs = socket.socketpair()
    me = os.getpid()
    handled = [one for one in _FORWARDED if signal.getsignal(one) != signal.SIG_IGN]  # nohup
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*handled, signal.SIGCHLD})
    agent = os.fork()
    if agent != 0:
        theirs.close()
        return _guard(agent, ours, handled, control)
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
    from launcher.agent import run_agent  # imports torch

    return run_agent(list(arguments), theirs, control)


def _guard(
    agent: int, notes: socket.socket, handled: Sequence[signal.Signals], control: Control | None
) -> int:
    """Wait for the agent's end. No handlers: blocked signals neither nest nor change the code."""
    passed_on: list[int] = []

    def kill_agent() -> None:
        passed_on.append(signal.SIGKILL)
        processes.send([agent], signal.SIGKILL)

    if control is not None:
        control.follow(kill_agent)
    while (ended := os.waitpid(agent, os.WNOHANG)) == (0, 0):
        signum = signal.sigwait({*handled, signal.SIGCHLD})
        if signum != signal.SIGCHLD:
            passed_on.append(signum)
            processes.send([agent], signum)
    status = ended[1]
    left = processes.end_descendants()
    code = processes.exit_code(status)
    if os.WIFSIGNALED(status):
        is_asked = os.WTERMSIG(status) in passed_on
        _report_death(code, notes, control, left=len(left), is_asked=is_asked)
    return code


def _report_death(
    code: int, notes: socket.socket, control: Control | None, *, left: int, is_asked: bool
) -> None:
    """The agent was killed, or stopped before it could heed a stop: tell so in its place."""
    notes.setblocking(False)
    try:
        told = json.loads(notes.recv(65536))
    except (OSError, ValueError):  # it died before it had anything to tell
        run_id = os.environ.get("RUN_ID", "")
        told = {"node_rank": 0, "run_id": run_id, "started": time.time(), "ranks": 0}
    failure = Failure(
        fault="agent-killed",
        cause=f"{signal.Signals(code - 128).name} to the node agent, from outside this run",
        code=code,
        host=socket.gethostname(),
        node_rank=told["node_rank"],
        time=time.time(),
    )
    summary = RunSummary(
        started=told["started"],
        lost_peer=0,
        stopped=told["ranks"],
        left=left,
        run_id=told["run_id"],
        command=os.environ.get("LAUNCH_COMMAND", "") if told["run_id"] else "",
    )
    end = End(code, None if is_asked else failure, summary, is_told=False)
    is_silent = is_asked and code == 128 + signal.SIGKILL  # the launcher is gone
    if not is_silent:
        report_end(end, control, is_line_open=True)


if __name__ == "__main__":
    sys.exit(main())
