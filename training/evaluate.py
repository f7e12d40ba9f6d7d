"""Evaluate a checkpoint on the validation data, without a run: train.py --evaluate CHECKPOINT."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from distributed import checkpoint
from distributed import torch as helper
from distributed.environment import Environment
from training.arguments import refuse_together
from training.batches import check_sizes
from training.config_file import SettingsError
from training.model import make_model, validate
from training.settings import Settings, Train
from training.tasks import load_task, metrics_as_text


def evaluate_checkpoint(
    name: str, settings: Settings, environment: Environment, *, as_json: bool
) -> int:
    """Print the validation metrics of a checkpoint on rank 0; returns the exit code 0.

    `name` is a checkpoint, or the folder or the id of a run, whose newest intact checkpoint is
    used. All ranks must call this; if one finds a mistake, all exit with 2. The metrics are those
    of the training's own validation at that step. With `as_json`, they are one line of JSON, in
    which a value that is not finite is null. Nothing is written.
    """
    helper.seed_everything(settings.seed)
    with refuse_together(environment):
        folder = find_folder(name, settings)
        saved = checkpoint.load(folder, whole=False)
        if saved is None:
            raise SettingsError(
                f"--evaluate {name!r}: {folder} holds no checkpoint; "
                "give a checkpoint, or the folder or the id of a run"
            )
        task = load_task(settings)
        samples = len(task.validation)  # type: ignore[arg-type]
        if not samples:
            raise SettingsError("data: validation has no samples; give it samples")

    with refuse_together(environment):  # all ranks have got this far: these are collectives
        check_sizes([samples])
        model = make_model(task, settings, None)
        helper.load(saved, model, None)

    step = saved.progress["step"]
    helper.beat(step, hang_seconds=settings.distributed.hang_seconds)
    helper.seed_everything(settings.seed, environment.rank)
    batch_size = batch_size_of(saved, settings.train, environment.world_size)
    values = validate(task, model, batch_size, settings, step)

    own = folder / f"step-{step}"
    found = (own if own.exists() else folder).resolve()
    if as_json:
        finite = {key: one if math.isfinite(one) else None for key, one in values.items()}
        facts = {"checkpoint": str(found), "step": step, "samples": samples, "metrics": finite}
        helper.print_main(json.dumps(facts))
    else:
        helper.print_main(f"validation {metrics_as_text(values)} ({samples:,} samples, {found})")
    return 0


def find_folder(name: str, settings: Settings) -> Path:
    """Return the folder of a run in checkpoint.dir or, without one, the folder with this path."""
    given = Path(os.path.expanduser(name))
    run = Path(os.path.expanduser(settings.checkpoint.dir)) / given
    return run if run.exists() else given


def batch_size_of(saved: checkpoint.State, train: Train, world_size: int) -> int:
    """Return the samples per batch and rank of the run that saved, so that sums round as in it.

    A config with other batches keeps its own.
    """
    before = saved.progress.get("settings", {}).get("train", {})
    names = "batch_size", "global_batch_size", "grad_accumulation"
    if any(before.get(one) != getattr(train, one) for one in names):
        return train.batch_size_on(world_size)
    shares = len(saved.ranks) * train.grad_accumulation
    return int(saved.progress["global_batch_size"]) // shares
