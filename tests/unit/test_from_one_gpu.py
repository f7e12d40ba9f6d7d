"""The script of docs/from-one-gpu.md runs after each step, and becomes examples/minimal_ddp.py."""

import re
import sys
from itertools import accumulate
from pathlib import Path

import pytest
from agents import ROOT, execute, written


def code_of(example: str) -> str:
    """Return an example's text after its docstring."""
    return (ROOT / f"examples/{example}.py").read_text().partition('"""\n\n')[2]


def take_step(script: str, step: str) -> str:
    """Return the script with the changes of a step, whose parts are separated by @@."""
    for part in step.split("@@\n"):
        lines = part.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


STEPS = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/from-one-gpu.md").read_text(), re.DOTALL)
SCRIPTS = [*accumulate(STEPS, take_step, initial=code_of("one_gpu"))]


def test_the_last_step_gives_the_example_for_many_gpus() -> None:
    assert len(STEPS) == 4
    assert SCRIPTS[-1] == code_of("minimal_ddp")


@pytest.mark.slow
def test_two_ranks_train_like_one_process_until_they_share_the_data(tmp_path: Path) -> None:
    alone, *launched = [written(tmp_path / f"step{at}.py", text) for at, text in enumerate(SCRIPTS)]
    launch = ROOT / "scripts/launch.sh", "--nproc-per-node=2"
    commands = [(sys.executable, alone), *((*launch, script) for script in launched)]
    shown = [execute(tmp_path, *words, CUDA_VISIBLE_DEVICES="").stdout for words in commands]

    losses = [re.findall(r"^epoch (\d)  loss ([\d.]+)$", text, re.M) for text in shown]
    assert [len(each) for each in losses] == [3] * 5
    assert losses[0] == losses[1] == losses[2]
    assert losses[3] != losses[2]
