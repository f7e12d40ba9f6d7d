"""A request to stop, by a signal or by the clock: all ranks stop at the end of the same step."""

from __future__ import annotations

import signal
import time

import torch
import torch.distributed as dist

from .stop_signals import STOP_SIGNALS, Interrupts, handled_signals


class Stop:
    """Records stop signals from its creation on; a handler only sets a flag.

    Create it on every rank, after the process group.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        self.reason = ""  # of this rank; empty until there is one
        self._interrupts = Interrupts()
        self._end = time.monotonic() + max_seconds if max_seconds else None
        self._group: dist.ProcessGroup | None = None  # the ranks' own, where that is gloo's
        self._work: dist.Work | None = None
        self._flag = torch.zeros(1)
        if dist.is_initialized() and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")  # does not wait for a GPU
        for signum in handled_signals():
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: object) -> None:
        self.reason = self.reason or signal.Signals(signum).name
        if signum == signal.SIGINT and self._interrupts.is_second():
            raise KeyboardInterrupt

    def ask(self) -> None:
        """Send this rank's flag to the others, while the step computes until `agreed` is called.

        Every rank calls it in every step, as late as leaves the flags time to travel. A request
        that comes after this call stops the ranks one step later.
        """
        if not self.reason and self._end and time.monotonic() >= self._end:
            self.reason = "max_seconds"
        self._flag.fill_(bool(self.reason))
        if dist.is_initialized():
            self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, self._group, async_op=True)

    def agreed(self) -> bool:
        """Return whether any rank has asked for a stop: the same on all, at the step's end."""
        if self._work is not None:
            self._work.wait()
        return bool(self._flag.item())


def ignore_signals(_worker: int) -> None:
    """Ignore stop signals in a data worker (a `worker_init_fn`): schedulers send it them, too."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
