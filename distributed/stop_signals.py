"""Which signals ask a run to stop, how long it may then save, a second Ctrl-C (no torch)."""

from __future__ import annotations

import os
import signal
import time

from . import limits

ADDED = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # the variable of torchrun's --signals-to-handle
NEVER_ADDED = {"SIGKILL", "SIGSTOP", "SIGCHLD"}
NOTICE = signal.SIGUSR1  # schedulers send it minutes before they end a job
QUERY = signal.SIGQUIT  # Ctrl-\\ shows where all ranks are; the run continues
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, NOTICE)


def stop_signals() -> list[signal.Signals]:
    """Return STOP_SIGNALS, and those that --signals-to-handle adds."""
    added = {*os.environ.get(ADDED, "").replace(" ", "").split(",")} - NEVER_ADDED
    more = [one for one in signal.Signals if one.name in added and one not in STOP_SIGNALS]
    return [*STOP_SIGNALS, *more]


def handled_signals() -> list[signal.Signals]:
    """Return the stop signals that this process does not ignore, as it does under nohup."""
    return [one for one in stop_signals() if signal.getsignal(one) != signal.SIG_IGN]


class Interrupts:
    """Tells a second Ctrl-C from one that arrives twice. The second one ends a run at once."""

    def __init__(self) -> None:
        self._first = 0.0  # monotonic seconds

    def is_second(self) -> bool:
        """Call it at each SIGINT: True more than SECOND_INTERRUPT_S after the first one."""
        now = time.monotonic()
        self._first = self._first or now
        return now - self._first > limits.SECOND_INTERRUPT_S
