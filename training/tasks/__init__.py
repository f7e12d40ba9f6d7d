"""What train.py can train: the built-in language model, or a class of yours.

    # my_task.py, next to the config or in the folder you start from; `task: my_task:Digits`
    class Digits(Task):
        def __init__(self, settings):
            self.train, self.validation = MyDigits("train"), MyDigits("test")

        def model(self):
            return nn.Linear(784, 10)

        def loss(self, model, batch):
            pixels, labels = batch
            return F.cross_entropy(model(pixels), labels)

`settings.model` holds your config's `model:` section. train.py does the rest: logging, checkpoints,
the learning rate and everything distributed.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import Dataset

from training.settings import BUILT_IN_TASK, Settings


class Task(Protocol):
    """A model, its data and its loss. Every rank creates one from the same settings."""

    train: Dataset[Any]  # has a length; `loss` gets its batches on the model's device
    validation: Dataset[Any]
    unit: str = "samples"  # what `weight` counts

    def __init__(self, settings: Settings) -> None: ...

    def model(self) -> nn.Module:
        """Return a new model. Random generators are in the same state on every rank."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over a batch, a scalar."""
        ...

    def weight(self, batch: Any) -> int:
        """Return how many terms `loss` is the mean of, for exact averages and for the speed."""
        return len(batch if isinstance(batch, Tensor) else next(iter(batch)))

    def metrics(self, loss: float) -> dict[str, float]:
        """Return further values to record with a loss, by name."""
        return {}

    def describe(self) -> str:
        """Return one line about the data, shown at the start."""
        return ""

    def summary(self, model: nn.Module, validation_loss: float) -> list[tuple[str, str]]:
        """Return (label, text) pairs that rank 0 prints at the end, after a validation."""
        return [("validation", f"loss {validation_loss:.4f}")]


def load_task(settings: Settings) -> Task:
    """Create the task that the settings name. Raises SettingsError, such as for missing data."""
    if settings.task == BUILT_IN_TASK:
        from training.tasks.language_model import LanguageModelTask

        return LanguageModelTask(settings)
    module, _, name = settings.task.partition(":")
    task: Task = getattr(importlib.import_module(module), name)(settings)
    return task
