"""Ranks wait for each other through the store, so that a stuck rank can report its fault to all."""

import contextlib
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from launcher.selftest.report import Fault
from launcher.text import count
from launcher.typed_json import encode, parse
from launcher.wire import limits

_STUCK = "selftest/stuck"


class StuckError(RuntimeError):
    """A rank could not continue, because of the fault that it found."""

    args: tuple[Fault]


@dataclass
class Barrier:
    """A barrier for some of the ranks, which must all make the same calls in the same order."""

    store: Store
    name: str
    size: int  # ranks
    met: int = 0  # times

    def wait_for_all(self, what: str, limit_s: float = limits.SELFTEST_S) -> None:
        """Return once all have arrived.

        Raises StuckError if one has called give_up(), or does not arrive in `limit_s` seconds;
        `what` is then named as what it did not finish.
        """
        self.met += 1
        here = f"selftest/{self.name}/{self.met}"
        deadline = time.monotonic() + limit_s
        if self.store.add(here, 1) == self.size:
            self.store.set(f"{here}/all", "")

        while True:
            with contextlib.suppress(dist.DistStoreError):
                self.store.wait([f"{here}/all"], timedelta(seconds=limits.SELFTEST_LOOK_S))
                return
            if self.store.check([_STUCK]):
                raise StuckError(parse(Fault, self.store.get(_STUCK)))
            if time.monotonic() > deadline:
                left = self.size - self.store.add(here, 0)  # adding 0 reads the counter
                cause = f"{count(left, 'rank')} did not finish {what}"
                raise StuckError(Fault("rank-stuck", cause))

    def give_up(self, fault: Fault) -> StuckError:
        """Report a fault to all waiting ranks. Returns the error to raise."""
        self.store.set(_STUCK, encode(fault))
        return StuckError(fault)
