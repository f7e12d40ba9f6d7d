"""train.py as it is, except that it takes its steps in turn with bare_loop.py, for step.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from turns import Turns

import train
from distributed.torch import finish
from training.arguments import read_command_line

turns = Turns()


class Run(train.Run):
    """A block ends when the first step of the next one begins: everything before that counts."""

    def take_step(self, step: int) -> None:
        turns.before(step)
        super().take_step(step)


train.Run = Run  # type: ignore[misc]
finish(train.train(*read_command_line(__doc__)))
