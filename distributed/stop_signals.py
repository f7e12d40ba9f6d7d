"""The signals that ask a run to stop, and how to recognize a second Ctrl-C (no torch)."""

from __future__ import annotations

import os
import signal
import time

from . import limits

ADDED = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # the variable of torchrun's --signals-to-handle
NEVER_ADDED = {"SIGKILL", "SIGSTOP", "SIGCHLD"}
# Schedulers send one of them minutes before they end a job; submitit asks for SIGUSR2.
NOTICES = signal.SIGUSR1, signal.SIGUSR2
QUERY = signal.SIGQUIT  # Ctrl-\\ shows where each rank is; the run continues
STOP_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *NOTICES


def stop_signals() -> list[signal.Signals]:
    """Return STOP_SIGNALS, and those that --signals-to-handle adds."""
    return [one for one in signal.Signals if one in STOP_SIGNALS or one.name in _added()]


def notices() -> list[signal.Signals]:
    """Return NOTICES without those that --signals-to-handle names: it makes them stop the run."""
    return [one for one in NOTICES if one.name not in _added()]


def _added() -> set[str]:
    """Return the names that --signals-to-handle adds, as far as a process can handle them."""
    return {*os.environ.get(ADDED, "").replace(" ", "").split(",")} - NEVER_ADDED


def handled_signals() -> list[signal.Signals]:
    """Return the stop signals that this process does not ignore; nohup ignores SIGHUP."""
    return [one for one in stop_signals() if signal.getsignal(one) != signal.SIG_IGN]


class Interrupts:
    """Distinguishes a second Ctrl-C, which ends the run at once, from one delivered twice.

    Schedulers and terminals may send one Ctrl-C to a process twice within milliseconds.
    """

    def __init__(self) -> None:
        self._first = 0.0  # when the first one came, in monotonic seconds; 0: none yet

    def record_and_check(self) -> bool:
        """Record a SIGINT; return whether the first one was over SECOND_INTERRUPT_S seconds ago."""
        now = time.monotonic()
        self._first = self._first or now
        return now - self._first > limits.SECOND_INTERRUPT_S
