"""Requests to stop or save, by signal, clock or file; all ranks act on them at the same step."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import limits
from .collectives import gloo_group, has_group
from .stop_signals import Interrupts, handled_signals


class Stop:
    """Records stop signals from its creation on, and lets all ranks agree on a stop or a save.

    Create it on every rank, after the process group, in the main thread (elsewhere, it raises
    ValueError). It replaces the handlers of the stop signals: the new one only sets a flag, but a
    second Ctrl-C raises KeyboardInterrupt. It requests a stop `max_seconds` after its creation, and
    a save `save_seconds` after the last one; None or 0 means never. A file named `stop` in `folder`
    requests a stop, a file named `save` a save; a rank with a `folder` deletes these files.
    """

    def __init__(
        self,
        max_seconds: float | None = None,
        *,
        save_seconds: float | None = None,  # between one save and the next
        folder: Path | str | None = None,
    ) -> None:
        self.reason = ""  # why this rank asks to stop; empty if it does not
        self.is_save_agreed = False  # `agreed` found a request to save and none to stop
        self.is_end_agreed = False  # a rank has called `end`
        self._is_end_asked = False  # this rank has called `end`
        self._interrupts = Interrupts()

        now = time.monotonic()
        self._stop_at = now + (max_seconds or math.inf)
        self._save_seconds = save_seconds or math.inf
        self.restart_save_clock()
        self._folder = folder
        self._next_check = now

        self._group: dist.ProcessGroup | None = None  # None: the default group, which uses gloo
        self._work: dist.Work | None = None
        self._flags = torch.zeros(3)  # stop, save, end
        if has_group() and dist.get_backend() != "gloo":
            self._group = gloo_group()  # does not wait for a GPU

        for signum in handled_signals():
            before = signal.signal(signum, self._on_signal)
            if not _is_ours(before):
                _before[signum] = before
        _stops.add(self)

    def _on_signal(self, signum: int, frame: object) -> None:
        """Record a signal as the reason to stop; raises KeyboardInterrupt at a second Ctrl-C."""
        self.reason = self.reason or signal.Signals(signum).name
        if signum == signal.SIGINT and self._interrupts.record_and_check():
            raise KeyboardInterrupt

    def ask(self) -> None:
        """Start sending this rank's requests to the others, while the step computes.

        Requests are: a stop, after a stop signal, `max_seconds` or a file `stop`; a save, after
        `save_seconds` or a file `save`; and the run's end, after `end`. Once in STOP_LOOK_S
        seconds, this looks for the files, and deletes them.

        All ranks must call this in every step, early enough for the requests to arrive before
        `agreed` is called. A request made after this call takes effect one step later.
        """
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + limits.STOP_LOOK_S
            if self._delete_file("save"):
                self._save_at = now
            if self._delete_file("stop"):
                self.reason = self.reason or "the stop file"
        if now >= self._stop_at:
            self.reason = self.reason or "max_seconds"

        is_save_due = now >= self._save_at
        self._flags.copy_(torch.tensor([bool(self.reason), is_save_due, self._is_end_asked]))
        if dist.is_initialized():
            self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, self._group, async_op=True)

    def _delete_file(self, name: str) -> bool:
        """Delete the user's file with this name, if there is one; returns whether there was."""
        if self._folder:
            with contextlib.suppress(OSError):
                Path(self._folder, name).unlink()
                return True
        return False

    def agreed(self) -> bool:
        """At a step's end, return whether any rank has asked to stop; the same on all ranks.

        Waits for what `ask` started. Also sets `is_save_agreed` and `is_end_agreed`; a request to
        save restarts the clock of `save_seconds`.
        """
        if self._work is not None:
            self._work.wait()
        is_stop, is_save, self.is_end_agreed = map(bool, self._flags.tolist())
        self.is_save_agreed = is_save and not is_stop
        if is_save:  # one request, one save
            self.restart_save_clock()
        return is_stop

    def end(self) -> None:
        """Ask for the run to end; all ranks agree on it in the next step."""
        self._is_end_asked = True

    def restart_save_clock(self) -> None:
        """Start counting the seconds until the next save."""
        self._save_at = time.monotonic() + self._save_seconds


_stops = weakref.WeakSet[Stop]()


def restart_save_clock() -> None:
    """Start counting the seconds until the next save, in every Stop of this process."""
    for stop in [*_stops]:
        stop.restart_save_clock()


_before = dict[int, Any]()  # the handlers that a Stop has replaced


def _is_ours(handler: Any) -> bool:
    """Return whether a signal handler is the method of a Stop."""
    return isinstance(getattr(handler, "__self__", None), Stop)


def _hold_signals() -> None:
    """Before a fork, hold back the stop signals.

    In the child, our handler would only set a flag that nothing reads; see _restore_handlers().
    """
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _before)


def _release_signals() -> None:
    """Deliver what was held back during a fork, in the parent and in the child."""
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _restore_handlers() -> None:
    """In a forked child, restore the handlers that a Stop replaced.

    Nothing asks the child to stop after a step, so a signal must end it.
    """
    for signum, before in _before.items():
        if _is_ours(signal.getsignal(signum)):
            signal.signal(signum, before or signal.SIG_DFL)
    _release_signals()


_held = threading.local()  # the signals that were blocked before a fork
os.register_at_fork(
    before=_hold_signals, after_in_parent=_release_signals, after_in_child=_restore_handlers
)
