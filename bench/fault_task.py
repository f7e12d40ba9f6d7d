"""The task for `make bench-faults`: the file "fault" makes rank 2 slow or its loss NaN."""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from training.settings import Settings
from training.tasks import Task


class Faulty(Task):
    """A linear layer; a step takes 0.02 s."""

    def __init__(self, settings: Settings) -> None:
        self.train = self.validation = TensorDataset(torch.ones(64, 8))

    def model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        is_faulty = os.environ["RANK"] == "2" and Path("fault").exists()
        fault = Path("fault").read_text().strip() if is_faulty else ""
        time.sleep(0.04 if fault == "slow" else 0.02)
        loss: Tensor = model(batch[0]).square().mean()
        return loss * float("nan") if fault == "nan" else loss
