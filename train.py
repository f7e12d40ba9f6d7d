"""Train a task on one process or on many.

    python train.py --config config/local3.yaml                         # this process alone
    python train.py --config config/local3.yaml train.max_steps=100     # any setting, changed
    python train.py --config config/local3.yaml --check                 # only look at the config
    scripts/ssh/launch_singlenode.sh config/local3.yaml 2               # 2 processes here
    torchrun --nproc-per-node 2 train.py --config config/local3.yaml    # the same through torchrun

What is trained is a task, the built-in one or yours: see training/tasks/__init__.py. A run with
the RUN_ID of an earlier one goes on where that one saved last.
"""

from __future__ import annotations

from training.arguments import one_voice, refuse, start

if __name__ == "__main__":
    arguments, settings = start(__doc__)

# Only now, for torch takes over a second to import, and --check and a wrong config need none of it.
import argparse
import logging
import math
import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from distributed import checkpoint
from distributed.torch import (
    beat,
    device,
    finish,
    get_dataloader_for_distributed,
    init_distributed,
    no_sync,
    seed_everything,
    setup_distributed_models,
    sync_metrics,
    unwrap,
)
from training.batches import Batches, move, share_of
from training.optimizer import find_last_step, learning_rate, make_optimizer
from training.progress import Limits, Meter, Progress
from training.settings import Settings, SettingsError
from training.tasks import Task, load_task

log = logging.getLogger(__name__)


def train(arguments: argparse.Namespace, settings: Settings) -> None:
    os.umask(0o077)  # logs and checkpoints are their user's alone

    # Who am I, and with whom?
    torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]
    try:
        environment = init_distributed(
            backend=settings.distributed.backend,
            join_timeout_s=settings.distributed.join_timeout,
            timeout_s=settings.distributed.timeout,
            local_rank=arguments.local_rank,
        )
    except ValueError as error:  # what the launcher or the config has wrong
        refuse(error)
    rank, world_size = environment.rank, environment.world_size
    if environment.is_main or arguments.log_level == "DEBUG":
        logging.basicConfig(level=arguments.log_level, format="%(message)s")
    run_folder = Path(settings.checkpoint.dir) / environment.run_id
    keep_last, accumulation = settings.checkpoint.keep_last, settings.train.grad_accumulation

    # What is learnt, on what? Training data is one endless stream, validation data is shared out.
    seed_everything(settings.seed)
    with one_voice(environment):
        if settings.resume == "never" and checkpoint.steps(run_folder):
            raise SettingsError(f"resume: never, but {run_folder} is not empty; use a new RUN_ID")
        batch_size = settings.train.batch_size_on(world_size)
        task = load_task(settings)
        loader = get_dataloader_for_distributed(
            task.train,
            batch_size=batch_size,
            shuffle=True,
            seed=settings.seed,
            num_workers=settings.data.num_workers,
            pin_memory=settings.data.pin_memory,
            drop_last=True,
        )
        if len(loader) == 0:
            raise SettingsError(f"data: too little for {world_size} batches of {batch_size}")
    validation = DataLoader(share_of(task.validation, rank, world_size), batch_size=batch_size)

    # By which model? The weights begin the same on every rank; after them, dropout differs.
    with one_voice(environment):
        saved = find_checkpoint(settings.resume, run_folder)
        model = task.model()
        if saved:
            model.load_state_dict(saved.model)
        model = setup_distributed_models(
            model,
            strategy=settings.distributed.strategy,
            find_unused_parameters=settings.distributed.find_unused_parameters,
        )
    optimizer = make_optimizer(model, settings.train)
    seed_everything(settings.seed, rank)

    # From where? The random generators come last: opening the stream draws from them.
    place = saved.progress if saved else {"step": 0, "epoch": 0, "samples": 0}
    step = first_step = place["step"]
    samples_at_once = batch_size * world_size
    batches = Batches(loader, epoch=place["epoch"], done=place["samples"] // samples_at_once)
    if saved:
        optimizer.load_state_dict(saved.optimizer)
        if rank < len(saved.rng):
            checkpoint.set_rng_state(saved.rng[rank])
        log.info(f"resumed    after step {step}")
    last_step = find_last_step(settings.train, len(loader))

    size = sum(parameter.numel() for parameter in model.parameters())
    log.info(f"model      {size:,} parameters, on {world_size} x {device().type}")
    log.info(f"data       {task.describe()}")
    limits = Limits(first_step, last_step, settings.train.max_seconds)
    log_folder = environment.log_dir / environment.run_id
    progress = Progress(log_folder, task.unit, limits, enabled=environment.is_main)
    meter = Meter()
    validation_loss = None
    is_over = last_step is not None and step >= last_step
    while not is_over:
        rate = learning_rate(step, settings.train, last_step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for micro in range(accumulation):
            batch = move(next(batches), device())
            # Gradients travel between the ranks once a step, with the last micro-batch.
            with no_sync(model, enabled=micro < accumulation - 1):
                with autocast(settings):
                    loss = task.loss(model, batch)
                (loss / accumulation).backward()  # type: ignore[no-untyped-call]
            meter.add(loss, task.weight(batch))
        if settings.train.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), settings.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        beat(step)

        is_over = step == last_step
        if is_over or step == first_step + 1 or step % settings.train.log_every == 0:
            # The mean is the same on every rank, so that all stop at one step.
            mean = sync_metrics({"seconds": meter.wall(), **meter.read()})
            is_over |= mean["seconds"] >= (settings.train.max_seconds or math.inf)
            with meter.paused():
                values = {"loss": mean["loss"], **task.metrics(mean["loss"]), "lr": rate}
                values[f"{task.unit}_per_second"] = mean["speed"] * world_size
                progress.record(step, values)
        progress.step(step)
        if is_time(step, settings.train.eval_every, is_over):
            with meter.paused():
                # Without its wrapper, for ranks may have different numbers of batches.
                validation_loss = evaluate(task, unwrap(model), validation, settings)
                values = {"loss": validation_loss, **task.metrics(validation_loss)}
                progress.record(step, {f"validation_{name}": v for name, v in values.items()})
                progress.draw()
        if is_over or is_time(step, settings.checkpoint.every):
            with meter.paused():
                samples = batches.done * samples_at_once
                place = {"step": step, "epoch": batches.epoch, "samples": samples}
                weights, moments = unwrap(model).state_dict(), optimizer.state_dict()
                state = checkpoint.State(weights, moments, place, checkpoint.gather_rng_states())
                if environment.is_main:
                    checkpoint.save(run_folder, step, state, keep_last=keep_last)
                    beat(step, saved=step)

    progress.close()
    if environment.is_main:
        speed = f"{meter.speed() * world_size:,.0f} {task.unit}/s"
        time = timedelta(seconds=round(meter.wall()))
        print(f"done       {step} steps, {step - first_step} in {time}, {speed}")
        if validation_loss is not None:
            for label, text in task.summary(unwrap(model), validation_loss):
                print(f"{label:<10} {text}".replace("\n", "\n" + 11 * " "))
        print(f"checkpoint {run_folder / f'step-{step}'}")
        print(f"logs       {log_folder}: metrics.jsonl, loss.png, tensorboard")
        command = os.environ.get("LAUNCH_COMMAND") or shlex.join(["python", *sys.argv])
        print(f"resume     RUN_ID={shlex.quote(environment.run_id)} {command}")


def find_checkpoint(resume: str, run_folder: Path) -> checkpoint.State | None:
    """Return what the run goes on from: its own newest, else, for `resume: PATH`, what is there."""
    if resume == "never":
        return None
    state = checkpoint.load(run_folder)
    if state is None and resume != "auto":
        state = checkpoint.load(Path(resume))
        if state is None:
            raise SettingsError(f"resume: {resume} holds no checkpoint")
    return state


def autocast(settings: Settings) -> torch.autocast:
    enabled = settings.distributed.mixed_precision.enabled and device().type == "cuda"
    return torch.autocast(device().type, dtype=torch.bfloat16, enabled=enabled)


def is_time(step: int, every: int, is_over: bool = False) -> bool:
    return every > 0 and (is_over or step % every == 0)


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, own_share: DataLoader[Any], settings: Settings) -> float:
    """Return the mean loss over all ranks' shares, each term counted once."""
    model.eval()
    total, weight = 0.0, 0
    for batch in own_share:
        batch = move(batch, device())
        with autocast(settings):
            loss = task.loss(model, batch)
        total += loss.item() * task.weight(batch)
        weight += task.weight(batch)
    model.train()
    return sync_metrics({"loss": total / max(weight, 1)}, weight=weight)["loss"]


if __name__ == "__main__":
    train(arguments, settings)
    finish(0)  # train()'s loaders are gone by now, and their worker processes with them
