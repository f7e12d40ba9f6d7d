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

from training.arguments import refuse, start

if __name__ == "__main__":
    arguments, settings = start(__doc__)

# Only now, for torch takes over a second to import, and --check and a wrong config need none of it.
import argparse
import logging
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from distributed import checkpoint
from distributed.environment import Environment, LauncherError
from distributed.torch import (
    beat,
    device,
    finish,
    get_dataloader_for_distributed,
    init_distributed,
    is_main_process,
    no_sync,
    seed_everything,
    setup_distributed_models,
    sync_metrics,
    unwrap,
)
from training.batches import Batches, move, share_of
from training.optimizer import find_last_step, learning_rate, make_optimizer
from training.progress import Meter, Progress, clock
from training.settings import Settings, SettingsError
from training.tasks import Task, load_task


def train(arguments: argparse.Namespace, settings: Settings) -> None:
    # Who am I, and with whom?
    environment = join(settings, arguments.local_rank)
    rank, world_size = environment.rank, environment.world_size
    if environment.is_main or arguments.log_level == "DEBUG":
        logging.basicConfig(level=arguments.log_level, format="%(message)s")
    batch_size = settings.train.batch_size_on(world_size)
    accumulation = settings.train.grad_accumulation

    # What is trained? The weights begin the same on every rank; after them, dropout differs.
    seed_everything(settings.seed)
    task = load_task(settings, (Path.cwd(), arguments.config.resolve().parent))
    model = task.model()
    run_folder = Path(settings.checkpoint.dir) / environment.run_id
    saved = find_checkpoint(settings.resume, run_folder)
    if saved:
        model.load_state_dict(saved.model)
    model = setup_distributed_models(
        model,
        strategy=settings.distributed.strategy,
        find_unused_parameters=settings.distributed.find_unused_parameters,
    )
    optimizer = make_optimizer(model, settings.train)
    seed_everything(settings.seed, rank)

    # On what? Training data is one endless stream in random order; validation data is shared out.
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
        raise SettingsError(f"data: too little for {world_size} batches of {batch_size} samples")
    own_share = share_of(task.validation, rank=rank, world_size=world_size)
    validation = DataLoader(own_share, batch_size=batch_size)

    # From where? The random generators come last: opening the stream draws from them.
    place = saved.progress if saved else {"step": 0, "epoch": 0, "samples": 0}
    step = first_step = place["step"]
    done = place["samples"] // (batch_size * world_size)
    batches = Batches(loader, epoch=place["epoch"], done=done)
    if saved:
        optimizer.load_state_dict(saved.optimizer)
        if rank < len(saved.rng):
            checkpoint.set_rng_state(saved.rng[rank])
    last_step = find_last_step(settings.train, len(loader))

    progress = Progress(
        environment.log_dir / environment.run_id,
        unit=task.unit,
        first_step=first_step,
        last_step=last_step,
        max_seconds=settings.train.max_seconds,
        enabled=environment.is_main,
    )
    size = sum(parameter.numel() for parameter in model.parameters())
    progress.say(f"model      {size:,} parameters, on {world_size} x {device().type}")
    progress.say(f"data       {task.describe()}")
    if saved:
        progress.say(f"resumed    after step {step}")

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
            own = {"seconds": meter.wall(), **meter.read()}
            mean = sync_metrics(own)  # the same on every rank, so that all stop at one step
            is_over |= mean["seconds"] >= (settings.train.max_seconds or math.inf)
            with meter.paused():
                values = {"loss": mean["loss"], **task.metrics(mean["loss"]), "lr": rate}
                values[f"{task.unit}_per_second"] = mean["speed"] * world_size
                progress.record(step, values)
        progress.step(step)
        if is_time(step, settings.train.eval_every, is_over):
            with meter.paused():
                validation_loss = evaluate(task, unwrap(model), validation, settings)
                values = {"loss": validation_loss, **task.metrics(validation_loss)}
                progress.record(step, {f"validation_{name}": v for name, v in values.items()})
                progress.draw()
        if is_over or is_time(step, settings.checkpoint.every):
            with meter.paused():
                place["step"], place["epoch"] = step, batches.epoch
                place["samples"] = batches.done * batch_size * world_size
                save(run_folder, place, model, optimizer, settings.checkpoint.keep_last)

    progress.close()
    if environment.is_main:
        speed = f"{meter.speed() * world_size:,.0f} {task.unit}/s"
        print(f"done       {step} steps, {step - first_step} in {clock(meter.wall())}, {speed}")
        if validation_loss is not None:
            for label, text in task.summary(unwrap(model), validation_loss):
                print(f"{label:<10} {text}".replace("\n", "\n" + 11 * " "))
        print(f"checkpoint {run_folder / f'step-{step}'}")
        print(f"logs       {progress.folder}: metrics.jsonl, loss.png, tensorboard")
        print(f"resume     {resume_command(environment.run_id)}")


def join(settings: Settings, local_rank: int | None) -> Environment:
    """Join the other ranks. What the launcher or the config has wrong is the user's to cure."""
    # Torch may have been imported before --log-level was read.
    torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]
    try:
        return init_distributed(
            backend=settings.distributed.backend,
            join_timeout_s=settings.distributed.join_timeout,
            timeout_s=settings.distributed.timeout,
            local_rank=local_rank,
        )
    except ValueError as error:
        raise SettingsError(error) from error


def find_checkpoint(resume: str, run_folder: Path) -> checkpoint.State | None:
    """Return what the run goes on from: its own newest, else, for `resume: PATH`, what is there."""
    if resume == "never":
        if is_main_process() and checkpoint.steps(run_folder):
            raise SettingsError(f"resume: never, but {run_folder} is not empty; use a new RUN_ID")
        return None
    try:
        state = checkpoint.load(run_folder)
        if state is None and resume != "auto":
            state = checkpoint.load(Path(resume))
            if state is None:
                raise SettingsError(f"resume: {resume} holds no checkpoint")
    except checkpoint.CheckpointError as error:
        raise SettingsError(f"resume: {error}") from error
    return state


def autocast(settings: Settings) -> torch.autocast:
    enabled = settings.distributed.mixed_precision.enabled and device().type == "cuda"
    return torch.autocast(device().type, dtype=torch.bfloat16, enabled=enabled)


def is_time(step: int, every: int, is_over: bool = False) -> bool:
    return every > 0 and (is_over or step % every == 0)


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, own_share: DataLoader[Any], settings: Settings) -> float:
    """Return the mean loss over all ranks' shares, each term counted once.

    Args:
        model: without its wrapper, for ranks may have different numbers of batches.
    """
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


def save(
    run_folder: Path, place: dict[str, int], model: nn.Module, optimizer: Optimizer, keep_last: int
) -> None:
    """Save, on rank 0; the others give it the state of their random generators."""
    state = checkpoint.State(
        model=unwrap(model).state_dict(),
        optimizer=optimizer.state_dict(),
        progress=place,
        rng=checkpoint.gather_rng_states(),
    )
    if is_main_process():
        checkpoint.save(run_folder, place["step"], state, keep_last=keep_last)
        beat(place["step"], saved=place["step"])


def resume_command(run_id: str) -> str:
    command = os.environ.get("LAUNCH_COMMAND") or shlex.join(["python", *sys.argv])
    return f"RUN_ID={shlex.quote(run_id)} {command}"


if __name__ == "__main__":
    try:
        train(arguments, settings)
    except (SettingsError, LauncherError) as error:
        refuse(error)
    finish(0)  # train()'s loaders are gone by now, and their worker processes with them
