"""train.py, but rank 0 is killed before step 34 of its first attempt.

Appends a line to the file STEPS before each step: attempt, step, seconds since the epoch.
"""

import os
import signal
import time

import train
from distributed import torch as helper
from training.arguments import read_command_line

DIES_AT = 33
take_step = train.Run.take_step


def take_noted_step(run: train.Run, step: int) -> None:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if run.environment.is_main:
        with open(os.environ["STEPS"], "a") as file:
            file.write(f"{attempt} {step} {time.time()}\n")
        if (attempt, step) == ("0", DIES_AT):
            os.kill(os.getpid(), signal.SIGKILL)
    take_step(run, step)


if __name__ == "__main__":
    arguments, settings = read_command_line(__doc__)
    train.Run.take_step = take_noted_step  # type: ignore[assignment, method-assign]
    helper.finish(train.train(arguments, settings))
