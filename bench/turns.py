"""Two programs that train beside each other in turns, a block of steps each, for step.py.

What slows the machine for a while slows both alike: two runs, one after the other, differ by more
than a step of train.py costs.
"""

from __future__ import annotations

import os
import time
from io import FileIO
from pathlib import Path

BLOCK = 10  # steps; the same as between two lines of the log
NAMES = ("bare", "ours")  # in this order


class Turns:
    """One PROGRAM's turns, whose pipes are in the folder TURNS. All of its ranks wait for each."""

    def __init__(self) -> None:
        folder, name = Path(os.environ["TURNS"]), os.environ["PROGRAM"]
        other = next(pipe for pipe in NAMES if pipe != name)
        self._own, self._other = ((folder / one).open("r+b", 0) for one in (name, other))
        self._began = 0.0
        self._times = None  # of rank 0's clock
        if os.environ["RANK"] == "0":
            self._times = (folder / f"{name}.times").open("w", 1)

    def before(self, step: int) -> None:
        """At the start of a block, pass the turn on and wait for the next one."""
        if step % BLOCK == 0:
            if step:
                self.pass_on()
            self._own.read(1)
            self._began = time.perf_counter()

    def pass_on(self) -> None:
        """End a block: note its seconds per step, and let the other program's ranks go."""
        if self._times:
            self._times.write(f"{(time.perf_counter() - self._began) / BLOCK}\n")
            give_turn(self._other, int(os.environ["WORLD_SIZE"]))


def give_turn(pipe: FileIO, ranks: int) -> None:
    """Let a program's ranks take a block of steps: each reads one byte."""
    pipe.write(b"." * ranks)


def read_times(folder: Path, name: str) -> list[float]:
    """Return the seconds per step of each block that has ended."""
    return [float(line) for line in (folder / f"{name}.times").read_text().split()]
