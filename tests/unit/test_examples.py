"""Each program of examples/ runs as its first lines say."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import AGENT, PATIENCE_S, ROOT, execute, rarely, written
from launched import hash_of, state_of

LAUNCH = ROOT / "scripts/ssh/launch_singlenode.sh"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# Run ids of this worker of pytest alone: they make the ports.
WHOLE, STOPPED = (f"{name}-{os.getpid()}" for name in ("whole", "stopped"))


def run(folder: Path, *words: str, **variables: Any) -> str:
    return execute(folder, LAUNCH, *words, OMP_NUM_THREADS="1", **variables).stdout


def run_forked(folder: Path, run_id: str, *words: str) -> str:
    """As run() with two ranks and no config, by the agent alone."""
    command = [*AGENT, "--nproc-per-node=2", f"--rdzv-id={run_id}", *words]
    return execute(folder, *command, RUN_ID=run_id, OMP_NUM_THREADS="1").stdout


@pytest.mark.slow
@pytest.mark.another_torch("launch")
def test_the_minimal_one_learns(tmp_path: Path) -> None:
    out = run(tmp_path, "-", "2", TRAIN_SCRIPT=str(ROOT / "examples/minimal_ddp.py"))
    losses = [float(loss) for loss in re.findall(r"^epoch \d  loss ([\d.]+)$", out, re.M)]
    assert len(losses) == 3 and losses[2] < losses[0] / 4


@pytest.mark.slow
@pytest.mark.parametrize(("example", "steps"), [("resumable", 800), *rarely(("fsdp", 400))])
def test_a_stopped_one_ends_with_the_weights_of_an_uninterrupted_run(
    tmp_path: Path, example: str, steps: int
) -> None:
    script = str(ROOT / f"examples/{example}.py")
    run_forked(tmp_path, WHOLE, script, str(steps))
    variables = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [LAUNCH, "-", "2", "--", str(steps)],
        cwd=tmp_path,
        env={**os.environ, **variables, "TRAIN_SCRIPT": script, "RUN_ID": STOPPED},
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout
        next(line for line in launcher.stdout if line.startswith("step 100 "))
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 75
    (saved,) = (tmp_path / "checkpoints" / STOPPED).glob("step-*")
    assert 100 <= int(saved.name[5:]) < steps
    out = run_forked(tmp_path, STOPPED, script, str(steps))
    assert "step 100 " not in out and f"step {steps} " in out
    assert hash_of(tmp_path / "checkpoints" / WHOLE) == hash_of(tmp_path / "checkpoints" / STOPPED)


# Rank 1 kills itself in the third epoch of a new run; the second may still be being saved.
KILLED = """
    if epoch == 2 and env.rank == 1 and progress["step"] == 0:
        __import__("os").kill(__import__("os").getpid(), 9)
    model.eval()
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", *rarely("ddp")])
def test_a_killed_one_ends_with_the_bytes_of_an_uninterrupted_run(
    tmp_path: Path, strategy: str
) -> None:
    """Under torchrun, too."""
    text = (ROOT / "examples/mixed_precision.py").read_text()
    text = text.replace('STRATEGY, DTYPE = "ddp"', f'STRATEGY, DTYPE = "{strategy}"')
    (tmp_path / "whole.py").write_text(text)
    (tmp_path / "killed.py").write_text(text.replace("\n    model.eval()\n", KILLED))
    run_forked(tmp_path, WHOLE, "whole.py")
    variables: dict[str, Any] = {"OMP_NUM_THREADS": "1", "RUN_ID": STOPPED}
    variables["PYTHONPATH"] = str(ROOT / "launcher/importable")  # torchrun does not know us
    words = ["--nproc-per-node=2", "killed.py"]
    execute(tmp_path, ROOT / "scripts/launch.sh", *words, code=137, **variables)
    out = execute(tmp_path, *TORCHRUN, "killed.py", **variables).stdout
    assert "epoch 1 " not in out and "epoch 6 " in out
    assert hash_of(tmp_path / "checkpoints" / STOPPED) == hash_of(tmp_path / "checkpoints" / WHOLE)


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
    own = written(tmp_path / "own.py", PREAMBLE + calls + BETWEEN + loop.replace("while", told, 1))
    for steps, begin in (4, 0), (6, 4):
        run_id = f"page-{os.getpid()}"  # which makes the port, too
        variables = {"TRAIN_SCRIPT": str(own), "RUN_ID": run_id}
        out = run(tmp_path, "-", "2", "--", str(steps), **variables)
        assert out == f"{{'loss': 0.5}}\nafter {begin}\n"
        assert state_of(tmp_path / "checkpoints" / run_id).progress["step"] == steps
