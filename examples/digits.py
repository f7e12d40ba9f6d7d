"""Your own task: handwritten digits, trained by train.py with all its features.

    pip install scikit-learn
    scripts/ssh/launch_singlenode.sh examples/digits.yaml 2

The data, 1,797 images of 8 x 8 pixels, come with scikit-learn.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from training.settings import Settings
from training.tasks import Task


class Digits(Task):
    def __init__(self, settings: Settings) -> None:
        self.hidden = settings.model["hidden"]  # from the config's `model:`
        digits = load_digits()
        pixels = torch.tensor(digits.data / 16, dtype=torch.float32)  # [image, 64], 0 to 1
        labels = torch.tensor(digits.target)  # [image]
        is_trained = torch.arange(len(labels)) % 5 > 0  # one in five is validation data
        self.train = TensorDataset(pixels[is_trained], labels[is_trained])
        self.validation = TensorDataset(pixels[~is_trained], labels[~is_trained])

    def describe(self) -> str:
        return f"{len(self.train)} digits, and {len(self.validation)} for validation"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        pixels, labels = batch  # [batch, 64] and [batch]
        return cross_entropy(model(pixels), labels)

    def evaluate(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> dict[str, tuple[Tensor, int]]:
        pixels, labels = batch
        scores = model(pixels)
        loss = cross_entropy(scores, labels, reduction="sum")
        right = (scores.argmax(dim=1) == labels).sum()
        return {"loss": (loss, len(labels)), "accuracy": (right, len(labels))}
