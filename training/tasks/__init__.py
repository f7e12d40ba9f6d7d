"""What train.py can train: the built-in language model, or your own class.

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
the learning rate and everything distributed. All other members of a task have defaults: see below.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sized
from numbers import Real
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset

from training.asked import make_task, where
from training.classes import load_class
from training.progress import shown
from training.settings import BUILT_IN_TASK, Settings

SCORES = "validation_loss", "score"  # the keys that scores_of() returns


class Task(Protocol):
    """A model, its data and its loss. Every rank creates one from the same settings."""

    train: Dataset[Any] | IterableDataset[Any]  # `loss` gets its batches on the model's device
    validation: Dataset[Any]  # has a length
    unit: str = "samples"  # what `weight` counts
    flops: float = 0.0  # operations per unit in a training step, for MFU; 0: not known
    best: str = "loss"  # the checkpoint with the best value of this metric is kept
    best_is_highest: bool = False
    collate: Callable[[list[Any]], Any] | None = None  # makes a batch from samples; None: torch's

    def __init__(self, settings: Settings) -> None: ...

    def model(self) -> nn.Module:
        """Return a new model. Random generators are in the same state on every rank."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over a batch, a scalar."""
        ...

    def weight(self, batch: Any) -> int:
        """Return how many terms `loss` is the mean of, for exact averages and for the speed.

        By default, this is the length of the batch's first tensor, or of its first list of samples.
        """
        first = batch if isinstance(batch, Tensor | Mapping) else next(iter(batch))
        while isinstance(first, Mapping):
            first = next(iter(first.values()))
        return len(first)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[float | Tensor, float]]:
        """Return (sum, weight) of each metric over a batch.

        For example `{"loss": ..., "accuracy": (right, len(labels))}`. The metric's value is the
        total of its sums divided by the total of its weights, over all batches and ranks. None in
        place of a pair means that the batch has no terms for this metric.
        """
        terms = self.weight(batch)
        return {"loss": (loss_of(self, model, batch).item() * terms, terms)}

    def metrics(self, loss: float) -> Mapping[str, float | None]:
        """Return further values to record with a loss, by name; None for one that is missing."""
        return {}

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        """Return an optimizer, or None for AdamW with the settings' weight decay."""
        return None

    def schedule(self, optimizer: Optimizer, last_step: int | None) -> LRScheduler | None:
        """Return a scheduler, or None for warm-up and cosine.

        It is stepped after each optimizer step; ReduceLROnPlateau is stepped after each
        validation, with the metric named by `best`.
        """
        return None

    def loader(
        self, batch_size: int, *, rank: int, world_size: int, epoch: int, skip: int
    ) -> Iterable[Any]:
        """Return this rank's batches of an epoch, from batch `skip` on: as many as on other ranks.

        If this method is not overridden, `train` is read.
        """
        return ()

    def on_step(self, step: int) -> bool:
        """Return whether to end the run; called on every rank after each step."""
        return False

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether to end the run, as for early stopping; called on every rank."""
        return False

    def describe(self) -> str:
        """Return one line about the data, shown at the start."""
        train = getattr(self, "train", None)
        return f"{len(train):,} samples" if isinstance(train, Sized) else "a stream of samples"

    def summary(self, model: nn.Module, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """Return (label, text) pairs to print at the end; `metrics` are the last validation's."""
        return [("validation", metrics_as_text(metrics))]


def scores_of(task: Task, validated: Mapping[str, float]) -> dict[str, float | None]:
    """Return the scores that a checkpoint keeps, so that the best can be found: lower is better.

    Without the metric `task.best`, returns {}, and warns if there are other metrics.
    """
    best = validated.get(task.best)
    if best is None:
        if validated:
            warnings.warn(
                f"task.best is {task.best!r}, but evaluate returns {', '.join(validated)}; "
                "no checkpoint is kept as the best",
                stacklevel=1,
            )
        return {}

    lower = -best if task.best_is_highest else best
    ranked = lower if math.isfinite(lower) else math.inf  # never the best
    return {"validation_loss": validated.get("loss"), "score": ranked}


def metrics_as_text(metrics: Mapping[str, float]) -> str:
    """Return metrics as text, such as "loss 1.2345, accuracy 0.9000"."""
    return ", ".join(f"{name} {shown(value, 4)}" for name, value in metrics.items())


def load_task(settings: Settings) -> Task:
    """Create the settings' task; raises SettingsError, for example if its data is missing."""
    ours = "training.tasks.language_model:LanguageModelTask"
    kind = load_class(ours if settings.task == BUILT_IN_TASK else settings.task)
    return make_task(kind, Task, settings.task, settings)  # type: ignore[no-any-return]


def loss_of(task: Task, model: nn.Module, batch: Any) -> Tensor:
    """Return the task's loss; raises TypeError if it is not a single number."""
    loss = task.loss(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {[*loss.shape]}" if isinstance(loss, Tensor) else repr(loss)[:80]
        raise TypeError(
            f"{where(task.loss)}loss returned {what}; "
            "return the mean over the batch, a scalar tensor"
        )
    return loss


def _is_number(part: Any) -> bool:
    """Return whether this is a number, or a tensor with one element."""
    return part.numel() == 1 if isinstance(part, Tensor) else isinstance(part, Real)


def _is_pair(part: Any) -> bool:
    """Return whether this is the sum and the weight of a metric."""
    return isinstance(part, tuple | list) and len(part) == 2 and all(map(_is_number, part))


def metrics_of(task: Task, loss: float) -> dict[str, float]:
    """Return the task's further values that are not None; raises TypeError if one is no number."""
    found: Any = task.metrics(loss)
    is_right = isinstance(found, Mapping) and all(
        one is None or _is_number(one) for one in found.values()
    )
    if not is_right:
        raise TypeError(
            f"{where(task.metrics)}metrics returned {repr(found)[:80]}; return {{name: number}}"
        )
    return {name: float(value) for name, value in found.items() if value is not None}


def evaluate(task: Task, model: nn.Module, batch: Any) -> Mapping[str, Any]:
    """Return the sum and the weight of each metric, (0.0, 0.0) for None.

    Raises TypeError if the task returns anything else.
    """
    found: Any = task.evaluate(model, batch)
    is_right = isinstance(found, Mapping) and all(
        one is None or _is_pair(one) for one in found.values()
    )
    if not is_right:
        raise TypeError(
            f"{where(task.evaluate)}evaluate returned {repr(found)[:80]}; "
            "return {name: (sum, weight)}, both over the batch"
        )
    return {name: (0.0, 0.0) if one is None else one for name, one in found.items()}
