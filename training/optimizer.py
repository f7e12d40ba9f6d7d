"""The optimizer, its learning rate at each step, and the step at which a run ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from training.asked import where
from training.config_file import SettingsError
from training.settings import Train
from training.tasks import Task


def choose_optimizer(task: Task, model: nn.Module, settings: Train) -> Optimizer:
    """Return the task's own optimizer or, without one, AdamW.

    Raises SettingsError if the task returns anything else.
    """
    own = task.optimizer(model)
    _refuse_unless(own, Optimizer, task.optimizer)
    return make_optimizer(model, settings) if own is None else own


def _refuse_unless(own: Any, kind: type, method: Any) -> None:
    """Raise SettingsError if `own`, returned by a method of the task, is not None or a `kind`."""
    if own is not None and not isinstance(own, kind):
        found = f"{type(own).__module__}.{type(own).__qualname__}".removeprefix("builtins.")
        wanted = f"{kind.__module__}.{kind.__qualname__}"
        raise SettingsError(
            f"task: {where(method)}{method.__name__} returned a {found}; return a {wanted}, or None"
        )


def make_optimizer(model: nn.Module, settings: Train) -> AdamW:
    """Return AdamW with weight decay only for matrices, not for biases or gains.

    The mark "follows_config" is for follow_config() in training/model.py.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay, "follows_config": True},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)


def find_last_step(settings: Train, batches_per_epoch: int | None) -> int | None:
    """Return the last step of the run, or None if only time ends it.

    Raises SettingsError if the epochs have no complete step, or if the data's length is not known.
    """
    limits = [settings.max_steps] if settings.max_steps else []

    if settings.epochs:
        if batches_per_epoch is None:
            raise SettingsError("train.epochs: the data has no length; use train.max_steps")
        limits.append(settings.epochs * batches_per_epoch // settings.grad_accumulation)
        if not limits[-1]:
            raise SettingsError(
                f"train.epochs: the data has {batches_per_epoch} batches, too few for one step; "
                "lower train.grad_accumulation"
            )

    return min(limits) if limits else None


class Schedule:
    """The learning rate of each step, from the task's own scheduler or a warm-up and a cosine.

    Raises SettingsError if what the task returns is not a scheduler, or is a ReduceLROnPlateau that
    would never lower the learning rate, or lower it on every improvement.
    """

    def __init__(
        self, optimizer: Optimizer, task: Task, settings: Train, last_step: int | None
    ) -> None:
        self.optimizer = optimizer
        self.own = task.schedule(optimizer, last_step)
        _refuse_unless(self.own, LRScheduler, task.schedule)
        if isinstance(self.own, ReduceLROnPlateau):
            _check_plateau(self.own, task, settings)
        self._best = task.best
        self._settings = settings
        self._last_step = last_step
        self._peaks = [group["lr"] for group in optimizer.param_groups]

    def before(self, step: int) -> float:
        """Set the learning rates of a step, unless the task's scheduler does; returns the first."""
        if self.own is None:
            for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
                group["lr"] = peak * share_of_peak(step, self._settings, self._last_step)
        return float(self.optimizer.param_groups[0]["lr"])

    def after(self) -> None:
        """Step the task's own scheduler after an optimizer step, unless validations step it."""
        if self.own and not isinstance(self.own, ReduceLROnPlateau):
            self.own.step()

    def validated(self, metrics: Mapping[str, float]) -> None:
        """Step the task's ReduceLROnPlateau, if it is one, with the metric `task.best`."""
        if isinstance(self.own, ReduceLROnPlateau) and self._best in metrics:
            self.own.step(metrics[self._best])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the task's own scheduler, {} without one: ours has none."""
        return {} if self.own is None else dict(self.own.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state_dict() into the task's own scheduler; do nothing without one."""
        if self.own:
            self.own.load_state_dict(state)


def _check_plateau(own: ReduceLROnPlateau, task: Task, settings: Train) -> None:
    """Raise SettingsError if the learning rate would never fall, or fall on every improvement."""
    is_highest = own.mode == "max"
    cure = ""
    if not settings.eval_every:
        cure = "needs validations; set train.eval_every"
    elif is_highest != task.best_is_highest:
        cure = f"has mode={own.mode!r}, but best_is_highest is {task.best_is_highest}; match them"
    if cure:
        raise SettingsError(f"task: {where(task.schedule)}schedule: ReduceLROnPlateau {cure}")


def share_of_peak(step: int, settings: Train, last_step: int | None) -> float:
    """Return the learning rate divided by its peak: a linear warm-up, then a cosine to 0.

    Without a last step, it stays at 1 after the warm-up.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if last_step is None:
        return 1.0
    done = (step - settings.warmup_steps) / (last_step - settings.warmup_steps)
    return (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def norm_of_weights(model: nn.Module) -> float:
    """Return the norm of this rank's part of the trainable weights: not finite if one is not.

    Waits for the device.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    norms = [getattr(one, "to_local", one.detach)().float().norm() for one in trained]
    return float(torch.stack(norms).norm())  # waits once, not for each weight
