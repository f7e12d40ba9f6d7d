"""The loop of docs/your-script.md as a program, stopped and killed at random moments.

python page_loop.py: print the program. Its arguments: STEPS STRATEGY WORKERS SECONDS, the number of
data workers of each rank and the shortest time of a step.
"""

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import ROOT, Run, kill_what_is_left, written
from launched import hash_of

PREAMBLE = """
import sys, time
from pathlib import Path
import torch

STEPS, loss = int(sys.argv[1]), 0.5
dataset = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 320 * 8).view(320, 8))

def make_model():
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
    )

def loss_of(model, batch):
    time.sleep(float(sys.argv[4]))
    return (model(batch[0]) - batch[0].sum(dim=1, keepdim=True)).square().mean()
"""
BETWEEN = """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""
CHANGES = {
    "make_model()": "make_model(), strategy=sys.argv[2]",
    "shuffle=True": "shuffle=True, num_workers=int(sys.argv[3])",
    "step % 1000 == 0": "step % 7 == 0",  # with two ranks, an epoch has five steps
    "while step": "print_main('after', step)\nwhile step",
}
STEP_S = 0.01
MOST_S = 0.5  # from the first step to the moment: at most half of STEPS_FOR_ONE
STEPS_FOR_ONE = 100  # for each time that a run is interrupted
ENDS = {"stop": 75, "kill a rank": 137, "kill the launcher": -signal.SIGKILL}  # -> exit code


def write_program() -> str:
    """Return the calls and the loop as a program whose model has dropout, and which saves often."""
    page = (ROOT / "docs/your-script.md").read_text()
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    calls, loop, *_ = [block for block in blocks if "import" in block]
    text = calls + BETWEEN + loop
    for old, new in CHANGES.items():
        assert text.count(old) == 1, f"not once in the page's calls and loop: {old}"
        text = text.replace(old, new)
    return PREAMBLE + text


class PageLoop:
    """The program in a folder, run with two ranks."""

    def __init__(self, folder: Path, times: int, strategy: str = "ddp", workers: int = 0) -> None:
        """Prepare runs that are long enough to be interrupted this many times."""
        self.folder = folder
        self.settings = [str(STEPS_FOR_ONE * times), strategy, str(workers)]
        written(folder / "page.py", write_program())

    def finish(self, run_id: str) -> str:
        """Run to the end without pauses; returns the hash of the weights."""
        with self._started(run_id, 0) as run:
            err = run.finish()
        assert run.process.returncode == 0, err
        return hash_of(self.folder / "checkpoints" / run_id)

    def interrupt(self, run_id: str, how: str, after_s: float) -> bool:
        """Start it, and stop or kill it this long after its first step; returns whether it was."""
        with self._started(run_id, STEP_S) as run:
            run.wait_for("after ")
            time.sleep(after_s)  # the moment itself, not a wait
            with contextlib.suppress(OSError, IndexError):  # it has ended
                hit(run, how)
            err = run.finish()
            run.assert_gone()
        assert run.process.returncode in (0, ENDS[how]), err
        return run.process.returncode != 0

    @contextlib.contextmanager
    def _started(self, run_id: str, step_s: float) -> Iterator[Run]:
        options = ["--nproc-per-node=2", f"--rdzv-id={run_id}", "--log-dir=logs"]
        words = [*options, "page.py", *self.settings, str(step_s)]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            run = Run(words, RUN_ID=run_id, OMP_NUM_THREADS="1")
        try:
            yield run
        finally:
            kill_what_is_left([run])


def hit(run: Run, how: str) -> None:
    """Stop or kill a run in one of the ways of ENDS."""
    if how == "stop":
        run.process.terminate()
    elif how == "kill a rank":
        os.kill(random.choice(run.rank_pids()), signal.SIGKILL)
    else:
        run.process.kill()


def interrupt_at_random(folder: Path, times: int, strategy: str, workers: int) -> tuple[int, bool]:
    """Interrupt a run at random moments; returns how often it was, and whether it lost nothing."""
    loop = PageLoop(folder, times, strategy, workers)
    done = 0
    for _ in range(times):
        done += loop.interrupt("broken", random.choice([*ENDS]), random.uniform(0, MOST_S))
    return done, loop.finish("broken") == loop.finish("whole")


if __name__ == "__main__":
    print(write_program())
