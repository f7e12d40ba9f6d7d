"""A task with a mistake, for the picture of a failure: rank 1 raises an error in batch 120."""

import os

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from training.settings import Settings
from training.tasks import Task


class Failing(Task):
    def __init__(self, settings: Settings) -> None:
        inputs = torch.linspace(-3, 3, 8192)[:, None]  # [sample, 1]
        self.train = TensorDataset(inputs, inputs.sin())
        self.validation = TensorDataset(inputs[::8], inputs[::8].sin())
        self.batches = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.batches += 1
        if self.batches == 120 and os.environ["RANK"] == "1":
            raise ValueError("an input is 3.7, outside [-3, 3]")
        inputs, values = batch
        return mse_loss(model(inputs), values)
