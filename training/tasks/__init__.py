"""What train.py can train: the built-in language model, or a class of yours.

    # my_task.py, beside the config or where you start; use it with `task: my_task:Digits`
    class Digits(Task):
        def __init__(self, settings):
            self.train, self.validation = MyDigits("train"), MyDigits("test")

        def model(self):
            return nn.Linear(784, 10)

        def loss(self, model, batch):
            pixels, labels = batch
            return F.cross_entropy(model(pixels), labels)

`settings.model` holds whatever `model:` has in your config. Logging, checkpoints, the learning
rate and everything distributed are train.py's business.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import Dataset

from training.settings import BUILT_IN_TASK, Settings, SettingsError


class Task(Protocol):
    """A model, its data and its loss. Every rank makes one, from the same settings."""

    train: Dataset[Any]  # has a length; its batches reach `loss` on the model's device
    validation: Dataset[Any]
    unit: str = "samples"  # what `weight` counts

    def __init__(self, settings: Settings) -> None: ...

    def model(self) -> nn.Module:
        """Return a new model. The random generators are the same on every rank."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over a batch, a scalar."""
        ...

    def weight(self, batch: Any) -> int:
        """Return how many terms the mean of `loss` is over: for exact averages, and the speed."""
        return len(batch if isinstance(batch, Tensor) else next(iter(batch)))

    def metrics(self, loss: float) -> dict[str, float]:
        """Return what else to record beside a loss, by name."""
        return {}

    def describe(self) -> str:
        """Return one line about the data, shown at the start."""
        return ""

    def summary(self, model: nn.Module, validation_loss: float) -> list[tuple[str, str]]:
        """Return (label, text) pairs for rank 0 to print at the end, if there was a validation."""
        return [("validation", f"loss {validation_loss:.4f}")]


def load_task(settings: Settings) -> Task:
    """Make the task that the settings name. SettingsError: it, or its data, is not there."""
    if settings.task == BUILT_IN_TASK:
        from training.tasks.language_model import LanguageModelTask

        return LanguageModelTask(settings)
    module_name, _, class_name = settings.task.partition(":")
    module = importlib.import_module(module_name)
    if not hasattr(module, class_name):
        raise SettingsError(f"task: {module.__file__} has no class {class_name}")
    task: Task = getattr(module, class_name)(settings)
    return task
