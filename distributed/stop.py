"""A request to stop, by a signal or by the clock, that all ranks heed at the same step's end."""

from __future__ import annotations

import signal
import time

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
IMPATIENT_S = 1.0  # a SIGINT so long after the first means it


class Stop:
    """Heeds stop signals from its making on; a handler only sets a flag.

    Make it on every rank, after the process group.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        self.reason = ""  # of this rank; empty until there is one
        self._noted = 0.0
        self._end = time.monotonic() + max_seconds if max_seconds else None
        self._group: dist.ProcessGroup | None = None  # the ranks' own, where that is gloo's
        self._work: dist.Work | None = None
        self._flag = torch.zeros(1)
        if dist.is_initialized() and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")  # no waiting for a GPU
        for signum in SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup has it
                signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: object) -> None:
        if not self.reason:
            self.reason, self._noted = signal.Signals(signum).name, time.monotonic()
        elif signum == signal.SIGINT and time.monotonic() - self._noted > IMPATIENT_S:
            raise KeyboardInterrupt

    def ask(self) -> None:
        """Send this rank's flag to the others, beside what is computed until `agreed` is called.

        Every rank calls it in every step, as late as leaves the flags their time: what comes after
        it is heeded one step later.
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
    """Leave stops to the rank: schedulers signal its data workers too (a `worker_init_fn`)."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
