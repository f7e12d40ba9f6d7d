"""Between two log lines, no step waits for what the device computes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from agents import AGENT, ROOT

WORDS = [
    *("--config", str(ROOT / "config/local3.yaml")),
    *("model.layers=1", "model.width=16", "model.heads=2", "model.context=16"),
    *("train.global_batch_size=8", "train.grad_accumulation=2", "train.eval_every=0"),
    *("train.log_every=3", "train.max_steps=8", "checkpoint.every=0"),
]
READS = """
import torch
from torch.utils.data import TensorDataset
from training.tasks import Task

class Reads(Task):
    def __init__(self, settings):
        self.train = self.validation = TensorDataset(torch.ones(64, 1))

    def model(self):
        return torch.nn.Linear(1, 1)

    def loss(self, model, batch):
        loss = model(batch[0]).square().mean()
        return loss if loss.item() else loss + 1
"""
CONFIG = """
task: own:Reads
train: {max_steps: 5, batch_size: 4}
tracking: []
"""
pytestmark = pytest.mark.slow


def watch(folder: Path, nproc: int, *words: str) -> tuple[int, str]:
    """Train where each step is watched; returns the code and what was printed."""
    options = [f"--nproc-per-node={nproc}", "--log-dir=logs"]
    done = subprocess.run(
        [*AGENT, *options, str(ROOT / "bench/waits.py"), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_no_step_waits(tmp_path: Path, strategy: str) -> None:
    code, told = watch(tmp_path, 2, *WORDS, f"distributed.strategy={strategy}")
    assert code == 0 and "waits      none" in told, told


@pytest.mark.long
def test_a_loss_that_reads_a_tensor_is_found(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(READS)
    (tmp_path / "own.yaml").write_text(CONFIG)
    code, told = watch(tmp_path, 1, "--config", str(tmp_path / "own.yaml"))
    assert code == 1 and "waits      _local_scalar_dense, item" in told, told
