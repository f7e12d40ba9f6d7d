"""--detach: a launcher that keeps running without its terminal.

It runs from the beginning in a child process with its own session, so that nothing it starts
belongs to the terminal. Until the run starts, the child prints to the terminal while its parent
waits, and ends if its parent ends.
"""

import io
import os
import shlex
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

from distributed.environment import DEFAULT_LOG_DIR
from distributed.lock import update_link
from distributed.stop_signals import handled_signals
from launcher import processes
from launcher.failure_block import COLOURS
from launcher.fanout import transcript
from launcher.plan.plan import Plan
from launcher.record import run_json
from launcher.text import PlanError, open_own, print_row, short_host_name


def fork_launcher(plan: Plan, script: str) -> Callable[[], None]:
    """Continue in a child. Returns a function that redirects the child's output to the run's log.

    Only the child returns; it has a new session, and its sys.stderr also keeps a copy. The parent
    stays on the terminal and forwards signals. When the child calls the function, the parent prints
    commands for the run, with `script` as it was typed, and exits with 0. If the child exits first,
    the parent exits with the child's code. Raises PlanError if the run has no id yet.
    """
    if not plan.run_id:
        raise PlanError(
            "--detach needs the run id now, but node rank 0 chooses it later; "
            "set the same RUN_ID on every node"
        )

    log = plan.log_dir / plan.run_id / f"launcher_{short_host_name()}.log"
    sys.stdout.flush()
    sys.stderr.flush()

    reader, writer = os.pipe()
    me = os.getpid()
    child = os.fork()
    if child != 0:
        os.close(writer)
        code = _wait_for_start(child, reader)
        if code is None:
            again = shlex.quote(script)
            if plan.log_dir != Path(DEFAULT_LOG_DIR):
                again = f"LOG_DIR={shlex.quote(str(plan.log_dir))} {again}"
            print_row("detached", f"tail -f {shlex.quote(str(log))}")
            print_row("status", f"{again} --status {shlex.quote(plan.run_id)}")
            print_row("stop", f"{again} --stop {shlex.quote(plan.run_id)}")
        os._exit(code or 0)  # without exit handlers: they are the child's

    os.close(reader)
    processes.leave_terminal(me)
    sys.stderr = shown = _Copy(sys.stderr)
    return partial(_leave_terminal, plan, log, shown, writer)


def _wait_for_start(child: int, reader: int) -> int | None:
    """Wait until the run starts, and forward signals to the child until then.

    Returns the child's exit code if it exits first, otherwise None; from then on, this process
    ignores these signals.
    """
    handled = handled_signals()
    for signum in handled:
        signal.signal(signum, lambda signum, _: os.kill(child, signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    if not os.read(reader, 1):  # the child has exited, which closes its end of the pipe
        return processes.exit_code(os.waitpid(child, 0)[1])
    for signum in handled:  # from now on, --stop stops the run
        signal.signal(signum, signal.SIG_IGN)
    return None


def _leave_terminal(plan: Plan, log: Path, shown: "_Copy", writer: int) -> None:
    """In the child, copy the output so far to the log, print only there, and let the parent exit.

    stdin becomes /dev/null. If the log is the transcript, adds the transcript's links to it. Exits
    if the parent is gone. Raises Refused if the log cannot be written.
    """
    with run_json.writing_to(log.parent):
        file = open_own(log, "ab")
    if plan.has_transcript:  # the log is the transcript
        copy = transcript.new_file(plan)
        update_link(copy, os.path.relpath(log, copy.parent))

    processes.outlive_parent()
    try:
        os.write(writer, b"r")
    except OSError:  # the parent is gone: the user cancelled the run
        os._exit(1)
    os.close(writer)

    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (file.fileno(), 1), (file.fileno(), 2)):
        os.dup2(source, target)
    os.close(null)
    file.close()

    sys.stderr = shown.stream
    print(COLOURS.sub("", shown.getvalue()), end="", file=sys.stderr, flush=True)


class _Copy(io.StringIO):
    """A stream that passes on what is written to it, and keeps a copy."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(text)
        self.stream.flush()
        return super().write(text)

    def isatty(self) -> bool:
        return self.stream.isatty()
