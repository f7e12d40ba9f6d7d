"""The optimizer, its learning rate at each step, and the step at which a run ends."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import AdamW

from training.settings import Train


def make_optimizer(model: nn.Module, settings: Train) -> AdamW:
    """Return AdamW with weight decay for matrices alone, not for biases and gains."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)


def find_last_step(settings: Train, batches_per_epoch: int) -> int | None:
    """Return the step that ends the run, or None if only time does."""
    limits = [settings.max_steps] if settings.max_steps else []
    if settings.epochs:
        limits.append(settings.epochs * batches_per_epoch // settings.grad_accumulation)
    return min(limits, default=None)


def learning_rate(step: int, settings: Train, last_step: int | None) -> float:
    """Return a linear warm-up, then a cosine to 0; without a last step, a constant."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if last_step is None:
        return settings.learning_rate
    done = (step - settings.warmup_steps) / (last_step - settings.warmup_steps)
    return settings.learning_rate * (1 + math.cos(math.pi * done)) / 2
