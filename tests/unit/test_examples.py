"""Each program of examples/ runs as its first lines say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agents import AGENT, PATIENCE_S, ROOT

from distributed.checkpoint import load, weights_hash

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONGEST = 60  # lines
STEPS = 800  # enough for a signal to arrive in between


def start(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.Popen(
        [ROOT / "scripts/ssh/launch_singlenode.sh", *words],
        cwd=folder,
        env={**kept, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *words: str, **variables: str) -> str:
    with start(folder, *words, **variables) as launcher:
        out, err = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 0, err
    return out


def run_forked(folder: Path, run_id: str, *words: str) -> str:
    """As run() with two ranks and no config, by the agent alone."""
    variables = {**os.environ, "RUN_ID": run_id, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*AGENT, "--nproc-per-node=2", f"--rdzv-id={run_id}", *words],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(example: Path) -> None:
    text = example.read_text()
    assert len(text.splitlines()) <= LONGEST
    name = f"examples/{example.name}"
    commands = (f"TRAIN_SCRIPT={name} scripts/ssh/launch_singlenode.sh - 2", f"{name[:-2]}yaml 2")
    assert any(command in text for command in commands)


@pytest.mark.slow
@pytest.mark.another_torch("launch")
def test_the_minimal_one_learns(tmp_path: Path) -> None:
    out = run(tmp_path, "-", "2", TRAIN_SCRIPT=str(ROOT / "examples/minimal_ddp.py"))
    losses = [float(loss) for loss in re.findall(r"^epoch \d  loss ([\d.]+)$", out, re.M)]
    assert len(losses) == 3 and losses[2] < losses[0] / 4


@pytest.mark.slow
def test_the_resumable_one_ends_with_the_weights_of_an_uninterrupted_run(tmp_path: Path) -> None:
    script = str(ROOT / "examples/resumable.py")
    words = (script, str(STEPS))
    run_forked(tmp_path, "whole", *words)
    typed = ("-", "2", "--", str(STEPS))
    with start(tmp_path, *typed, TRAIN_SCRIPT=script, RUN_ID="stopped") as launcher:
        assert launcher.stdout
        next(line for line in launcher.stdout if line.startswith("step 100 "))
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 75
    (saved,) = (tmp_path / "checkpoints/stopped").glob("step-*")
    assert 100 <= int(saved.name[5:]) < STEPS
    out = run_forked(tmp_path, "stopped", *words)
    assert "step 100 " not in out and f"step {STEPS} " in out
    states = [load(tmp_path / "checkpoints" / name) for name in ("whole", "stopped")]
    assert len({weights_hash(state.model) for state in states if state is not None}) == 1


@pytest.mark.long
def test_the_task_recognises_digits(tmp_path: Path) -> None:
    out = run(tmp_path, str(ROOT / "examples/digits.yaml"), "2")
    share = re.search(r"^validation loss [\d.]+, accuracy ([\d.]+)$", out, re.M)
    assert share and float(share[1]) > 0.95


PREAMBLE = """
import itertools, sys
from pathlib import Path
import torch

STEPS, loss = int(sys.argv[1]), 0.5
dataset = torch.utils.data.TensorDataset(torch.randn(64, 8))
make_model = lambda: torch.nn.Linear(8, 1)
loss_of = lambda model, batch: model(batch[0]).square().mean()
"""
BETWEEN = """
optimizer, batches = torch.optim.AdamW(model.parameters()), itertools.cycle(loader)
"""


@pytest.mark.slow
def test_the_loop_that_the_page_shows_saves_and_resumes(tmp_path: Path) -> None:
    page = (ROOT / "docs/your-script.md").read_text()
    calls, loop = [
        one for one in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "import" in one
    ]
    told = "print_main('after', step)\nwhile"
    own = tmp_path / "own.py"
    own.write_text(PREAMBLE + calls + BETWEEN + loop.replace("while", told, 1))
    for steps, begin in (4, 0), (6, 4):
        variables = {"TRAIN_SCRIPT": str(own), "RUN_ID": "mine", "PYTHONPATH": str(ROOT)}
        out = run(tmp_path, "-", "2", "--", str(steps), **variables)
        assert out == f"{{'loss': 0.5}}\nafter {begin}\n"
        saved = load(tmp_path / "checkpoints/mine")
        assert saved and saved.progress["step"] == steps
