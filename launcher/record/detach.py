"""--detach: a launcher that goes on without its terminal.

It runs in a child process with a session of its own from the beginning, so that nothing it starts
belongs to the terminal. Until the run starts the child still prints there, and ends with the
parent, which waits.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from distributed.environment import job_id
from launcher import processes
from launcher.plan.plan import Plan, PlanError, print_row
from launcher.preflight.check_node import short_host_name
from launcher.record import run_json, transcript

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def prepare(plan: Plan, *, script: str) -> Callable[[], None]:
    """Return what a fan-out calls when nothing is left to refuse, before it starts an agent.

    That call writes run.json. With --detach, this goes on in a child process, and the call takes
    it from the terminal to a log.

    Args:
        script: as it was typed, for the commands that the user is told.

    Raises:
        PlanError: a detached run needs a name.
        Refused: a live run has its name.
    """
    if plan.is_dry_run:
        return lambda: None
    if plan.is_detached and not plan.run_id:
        cause = "node rank 0 names the run, and --detach must know its name"
        raise PlanError(f"{cause}; give RUN_ID, the same on every node")
    is_first = plan.node_rank == 0
    if is_first and not job_id(os.environ):  # a scheduler may start its job again beside the first
        run_json.refuse_live(plan.log_dir / plan.run_id)
    log = plan.log_dir / plan.run_id / f"launcher_{short_host_name()}.log"
    handover = _fork_launcher(_rows(plan, log, script)) if plan.is_detached else None

    def be_ready() -> None:
        if handover is not None:
            handover.leave_terminal(log)
            if plan.has_transcript:  # the log has it all
                file = transcript.new_file(plan)
                file.symlink_to(os.path.relpath(log, file.parent))
        if is_first:
            folder = plan.log_dir / plan.run_id
            run_json.note_start(folder, detached=plan.is_detached, grace=float(plan.grace_s))

    return be_ready


def _rows(plan: Plan, log: Path, script: str) -> list[tuple[str, str]]:
    log_dir = os.environ.get("LOG_DIR")
    again = shlex.join([*([f"LOG_DIR={log_dir}"] if log_dir else []), script])
    return [
        ("detached", f"tail -f {shlex.quote(str(log))}"),
        ("status", f"{again} --status {shlex.quote(plan.run_id)}"),
        ("stop", f"{again} --stop {shlex.quote(plan.run_id)}"),
    ]


def _fork_launcher(rows: Sequence[tuple[str, str]]) -> Handover:
    """Go on in a child; this process stays on the terminal until the run starts.

    It passes signals on to the child. When the run starts it prints the rows (label, text) and
    exits with code 0; where the child ends before that, it exits with the child's code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = socket.socketpair()
    me = os.getpid()
    child = os.fork()
    if child == 0:
        ours.close()
        os.setsid()
        processes.die_with_parent(me)
        return Handover(theirs)
    theirs.close()
    os._exit(_wait_for_start(child, ours, rows))


def _wait_for_start(child: int, channel: socket.socket, rows: Sequence[tuple[str, str]]) -> int:
    handled = [one for one in _SIGNALS if signal.getsignal(one) != signal.SIG_IGN]  # nohup
    for signum in handled:
        signal.signal(signum, lambda signum, _: os.kill(child, signum))
    with contextlib.suppress(OSError):
        if channel.recv(1):
            for signum in handled:  # from now on --stop is the way
                signal.signal(signum, signal.SIG_IGN)
            channel.sendall(b"g")
            for label, text in rows:
                print_row(label, text)
            return 0
    return processes.exit_code(os.waitpid(child, 0)[1])


class Handover:
    """In the child: its way from the terminal to the log."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._shown = _Copy(sys.stderr)
        sys.stderr = self._shown

    def leave_terminal(self, log: Path) -> None:
        """Print to the log from here on, after what was shown so far, and let the parent go.

        Exits where the parent has gone: then the user has changed his mind.

        Raises:
            Refused: the log cannot be written.
        """
        with run_json.writing_to(log.parent):
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        processes.outlive_parent()
        is_wanted = False
        with contextlib.suppress(OSError), self._channel as channel:
            channel.sendall(b"r")
            is_wanted = bool(channel.recv(1))
        if not is_wanted:
            _remove_empty(log)
            os._exit(1)
        sys.stdout.flush()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (fd, 1), (fd, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(fd)
        sys.stderr = self._shown.stream
        print(_COLOURS.sub("", self._shown.getvalue()), end="", file=sys.stderr, flush=True)


class _Copy(io.StringIO):
    """A stream that keeps what it is given, and passes it on."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(text)
        self.stream.flush()
        return super().write(text)

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()


def _remove_empty(log: Path) -> None:
    with contextlib.suppress(OSError):
        if log.stat().st_size == 0:
            log.unlink()
            log.parent.rmdir()
