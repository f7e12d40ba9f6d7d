"""Ranks wait for each other through the store, so that one that is stuck can say so to all."""

from __future__ import annotations

import time

from torch.distributed import Store  # type: ignore[attr-defined]

PATIENCE_S = 60.0
_PAUSE_S = 0.002  # between two looks, for each rank that looks
_STUCK = "selftest/stuck"


class StuckError(RuntimeError):
    """A rank could not go on; the text is the fault it found."""


class Meeting:
    """Some of the ranks, which all wait for each other in the same order."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store = store
        self._name = name
        self._size = size
        self._met = 0

    def wait_for_all(self, what: str, limit_s: float = PATIENCE_S) -> None:
        """Return once all have come; raises StuckError where one is stuck, or does not come."""
        self._met += 1
        here = f"selftest/{self._name}/{self._met}"
        come, deadline = self._store.add(here, 1), time.monotonic() + limit_s
        while come < self._size:
            time.sleep(min(0.1, _PAUSE_S * self._size))
            if self._store.check([_STUCK]):
                raise StuckError(self._store.get(_STUCK).decode())
            if time.monotonic() > deadline:
                raise StuckError(f"{self._size - come} ranks have not ended {what} [rank-stuck]")
            come = self._store.add(here, 0)

    def give_up(self, fault: str) -> StuckError:
        """Tell all who wait; returns what to raise."""
        self._store.set(_STUCK, fault)
        return StuckError(fault)
