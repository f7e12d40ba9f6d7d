"""Let two programs take turns, each training for a block of steps, for step.py.

A slow phase of the machine then slows both alike. Two runs, one after the other, would differ by
more than the cost of train.py.
"""

from __future__ import annotations

import os
import time
from io import FileIO
from pathlib import Path

BLOCK = 10  # steps; as many as between two lines of the log
NAMES = ("bare", "ours")  # in this order


class Turns:
    """The turns of one PROGRAM, with pipes in the folder TURNS. All its ranks wait for its turn."""

    def __init__(self) -> None:
        folder, name = Path(os.environ["TURNS"]), os.environ["PROGRAM"]
        other = next(pipe for pipe in NAMES if pipe != name)
        self._own, self._other = ((folder / one).open("r+b", 0) for one in (name, other))
        self._began = 0.0
        self._times = None  # by rank 0's clock
        if os.environ["RANK"] == "0":
            self._times = (folder / f"{name}.times").open("w", 1)

    def before(self, step: int) -> None:
        """At the start of a block, end the previous one and wait for this program's turn."""
        if step % BLOCK == 0:
            if step:
                self.pass_on()
            self._own.read(1)
            self._began = time.perf_counter()

    def pass_on(self) -> None:
        """End a block: record its seconds per step, and give the other program its turn."""
        if self._times:
            self._times.write(f"{(time.perf_counter() - self._began) / BLOCK}\n")
            give_turn(self._other, int(os.environ["WORLD_SIZE"]))


def give_turn(pipe: FileIO, ranks: int) -> None:
    """Let a program's ranks take a block of steps: each rank reads one byte."""
    pipe.write(b"." * ranks)


def read_times(folder: Path, name: str) -> list[float]:
    """Return the seconds per step of each block that has ended."""
    return [float(line) for line in (folder / f"{name}.times").read_text().split()]
