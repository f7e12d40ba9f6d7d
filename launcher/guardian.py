"""The node agent, one per node: `python -m distributed.run`, with torchrun's own arguments.

    python -m distributed.run --nproc-per-node 4 train.py --config config/local3.yaml

Two processes do the work. The guardian, this one, needs no torch: it passes signals on, and when
the agent ends, however it ends, it ends whatever is left below it. The agent (launcher/agent.py)
imports torch once and forks the ranks.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

from launcher import processes
from launcher.failure import Failure, RunSummary, print_block, print_stop

LEASH_S = 10.0  # without a word for so long, a launcher elsewhere is gone
TERM_S = 1.0  # from then on, for the ranks to save
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent below a guardian; returns the exit code (in a rank: that of its program)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # a stream that the caller has closed
        pass
    os.close(fd)
    processes.adopt_orphans()
    leash = _take_leash()
    ours, theirs = socket.socketpair()
    me = os.getpid()
    handled = [one for one in _FORWARDED if signal.getsignal(one) != signal.SIG_IGN]  # nohup
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*handled, signal.SIGCHLD})
    agent = os.fork()
    if agent != 0:
        theirs.close()
        return _guard(agent, ours, handled, leash)
    ours.close()
    if leash is not None:
        os.close(leash)
    os.setsid()  # a terminal's Ctrl-C reaches the guardian alone
    processes.die_with_parent(me)
    for signum in handled:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*handled, signal.SIGCHLD})
    if os.environ.get("LAUNCHER") == "torch.distributed.launch":
        from torch.distributed.launch import main as launch  # its ranks, its report

        launch(list(arguments))  # type: ignore[no-untyped-call]
        return 0
    from launcher.agent import run_agent  # imports torch

    return run_agent(list(arguments), theirs)


def _take_leash() -> int | None:
    """The stream that a launcher on another machine holds the end of, if one started this."""
    if os.environ.get("LEASH", "").rpartition(".")[2] != str(os.getppid()):
        return None  # none did, or this is a run within its run
    leash = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return leash


def _heed(leash: int, agent: int, passed_on: list[int]) -> None:
    """Pass on the signals whose names come, a line each; at the launcher's end, end the run."""
    pending = b""
    while select.select([leash], [], [], LEASH_S)[0] and (data := os.read(leash, 4096)):
        *lines, pending = (pending + data).split(b"\n")
        for name in filter(None, lines):
            os.kill(os.getpid(), signal.Signals[name.decode()])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TERM_S)
    passed_on.append(signal.SIGKILL)
    processes.send([agent], signal.SIGKILL)


def _guard(
    agent: int, notes: socket.socket, handled: Sequence[signal.Signals], leash: int | None
) -> int:
    """Wait for the agent's end. No handlers: blocked signals neither nest nor change the code."""
    passed_on: list[int] = []
    if leash is not None:
        threading.Thread(target=_heed, args=(leash, agent, passed_on), daemon=True).start()
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
        _report_death(code, notes, left=len(left), is_asked=is_asked)
    return code


def _report_death(code: int, notes: socket.socket, *, left: int, is_asked: bool) -> None:
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
    if not is_asked:
        print_block(failure, summary, sys.stderr)
    elif code != 128 + signal.SIGKILL:
        print_stop(code, summary, sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
