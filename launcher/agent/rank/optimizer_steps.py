"""Heartbeats for a script that sends none: each step of its optimizer counts as progress.

torch calls a global hook after every step of every optimizer, no matter whether the loop is the
user's, accelerate's or Lightning's. Steps are not counted if the script reports its own.
"""

import os
import time
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from distributed import limits
from distributed.heartbeat import Beat, Heart, find_record, stack_file_of


def count_steps(record: str, error_file: Path) -> None:
    """In a rank, before its script runs, prepare to count its steps and to write its stacks."""
    place = find_record(record)
    assert place is not None
    counter = StepCounter(CountedHeart(*place, stack_file_of(error_file)))
    os.register_at_fork(after_in_child=counter.stop)  # a rank's children count no steps
    register_optimizer_step_post_hook(counter)


class CountedHeart(Heart):
    """Beats with counted steps. The agent watches the rank from before the script's first line."""

    is_counted = True

    def __init__(self, fd: int, number: int, stack_file: Path) -> None:
        super().__init__(fd, number, stack_file)
        limit_s = self._limit_s or limits.FIRST_SILENCE_S
        start = time.monotonic()
        self._write(Beat(time=start, limit_s=limit_s, limit_by=self._limit_by, is_counted=True))


class StepCounter:
    """The hook. With several optimizers, it reports the highest of their step counts."""

    def __init__(self, heart: Heart) -> None:
        self._heart: Heart | None = heart
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._step = 0

    def stop(self) -> None:
        """Stop counting."""
        self._heart = None

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Record an optimizer step; stop counting if the script reports its own steps."""
        # While torch.compile traces the step, nothing is computed.
        if self._heart is None or torch.compiler.is_compiling():
            return
        if not self._heart.newest.is_counted:
            self.stop()
            return
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self._step = max(self._step, count)
        self._heart.beat(self._step, None, None)
