"""How a launcher ends after a Ctrl-C: a shell ends the loop or script only if SIGINT kills it."""

import contextlib
import os
import signal
import sys
from collections.abc import Container
from typing import NoReturn

from distributed.errors import STOPPED
from launcher.text import warn

INTERRUPTED = signal.SIGINT - 128  # exits with 130, but is not a script's own 130


def code_for_shell(code: int, signals: Container[int | None]) -> int:
    """Return an exit code, or INTERRUPTED if `signals` has a Ctrl-C and nothing else went wrong.

    Only a process in the foreground gets a Ctrl-C; in the background, the code stays.
    """
    is_stop = code in (STOPPED, 128 + signal.SIGINT)
    return INTERRUPTED if is_stop and signal.SIGINT in signals and is_in_foreground() else code


def leave(code: int) -> NoReturn:
    """Exit, after a Ctrl-C by its signal."""
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.raise_signal(signal.SIGINT)
    sys.exit(code)


def leave_unstarted(signum: int, *_: object) -> NoReturn:
    """Exit after a stop before the run has started; what runs until then ends with this process.

    A second such signal has no effect: Python may be about to end, and would show a traceback.
    """
    signal.signal(signum, lambda *_: None)  # other than SIG_IGN, no child inherits it
    warn(f"stopped  by {signal.Signals(signum).name}; nothing was started")
    raise SystemExit(code_for_shell(128 + signum, {signum}))


def is_in_foreground() -> bool:
    """Whether a Ctrl-C on a terminal reaches this process."""
    with contextlib.suppress(OSError), open("/dev/tty", "rb") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False
