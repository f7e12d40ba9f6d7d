"""Train a task on one process or on many.

    python train.py --config config/local3.yaml                         # this process alone
    python train.py --config config/local3.yaml train.max_steps=100     # any setting, changed
    python train.py --config config/local3.yaml --check                 # only look at the config
    scripts/ssh/launch_singlenode.sh config/local3.yaml 2               # 2 processes here
    torchrun --nproc-per-node 2 train.py --config config/local3.yaml    # the same through torchrun

What is trained is a task, the built-in one or yours: see training/tasks/__init__.py. A run with
the RUN_ID of an earlier one goes on where that one saved last. On SIGTERM, SIGINT, SIGHUP or
SIGUSR1, and after train.max_seconds, it saves and leaves with code 75.
"""

from __future__ import annotations

from training.arguments import refuse, refuse_together, start

if __name__ == "__main__":
    arguments, settings = start(__doc__)

# Only now, for torch takes over a second to import, and --check and a wrong config need none of it.
import argparse
import contextlib
import logging
import math
import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from distributed import checkpoint, checkpoint_files
from distributed import torch as helper
from distributed.environment import Environment
from distributed.errors import STOPPED
from distributed.stop import Stop
from training.batches import Batches, move, share_of
from training.optimizer import find_last_step, learning_rate, make_optimizer
from training.progress import Limits, Meter, Progress
from training.settings import Settings, SettingsError, Train
from training.tasks import Task, load_task

log = logging.getLogger(__name__)


def train(arguments: argparse.Namespace, settings: Settings) -> int:
    """Train to the end, or until a stop is asked for; returns the exit code."""
    os.umask(0o077)  # logs and checkpoints are their user's alone

    # Who am I, and with whom?
    torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]
    try:
        environment = helper.init_distributed(
            backend=settings.distributed.backend,
            join_timeout_s=settings.distributed.join_timeout,
            timeout_s=settings.distributed.timeout,
            local_rank=arguments.local_rank,
            nodes=arguments.nodes,
            ranks_per_node=arguments.gpus_per_node,
        )
    except ValueError as error:  # what the launcher or the config has wrong
        refuse(error)
    rank, world_size = environment.rank, environment.world_size
    if environment.is_main or arguments.log_level == "DEBUG":
        logging.basicConfig(level=arguments.log_level, format="%(message)s")
    run_folder = Path(settings.checkpoint.dir) / environment.run_id
    accumulation = settings.train.grad_accumulation
    stop = Stop(settings.train.max_seconds)

    # What is learnt, on what? Training data is one endless stream, validation data is shared out.
    helper.seed_everything(settings.seed)
    with refuse_together(environment):
        saver = checkpoint.Saver(
            run_folder, keep_last=settings.checkpoint.keep_last, enabled=environment.is_main
        )
        saved = find_checkpoint(settings.resume, run_folder, is_again=environment.restart_count > 0)
        batch_size = choose_batch_size(settings.train, world_size, saved)
        task = load_task(settings)
        loader = helper.get_dataloader_for_distributed(
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
    with refuse_together(environment):
        model = task.model()
        if saved:
            fill(model, saved.model)
        model = helper.setup_distributed_models(
            model,
            strategy=settings.distributed.strategy,
            find_unused_parameters=settings.distributed.find_unused_parameters,
        )
    optimizer = make_optimizer(model, settings.train)
    if world_size > 2:
        settle_buckets(task, model, batch_size, settings)
    helper.seed_everything(settings.seed, rank)

    # From where? Each rank has random numbers and half-read meters of its own.
    place: dict[str, Any] = saved.progress if saved else {"step": 0, "epoch": 0, "samples": 0}
    step = first_step = place["step"]
    per_batch, per_epoch = batch_size * world_size, len(loader)
    done = place["epoch"] * per_epoch + place["samples"] // per_batch
    batches = Batches(loader, seed=settings.seed, done=done)
    own: dict[str, Any] = {}
    if saved:
        optimizer.load_state_dict(saved.optimizer)
        own = saved.ranks[rank] if rank < len(saved.ranks) else {}
        if own:
            checkpoint.set_rng_state(own["rng"])
        log.info(f"resumed    after step {step}")
        before = (place["global_batch_size"], len(saved.ranks))
        if before[0] != per_batch * accumulation:
            log.info(f"           batches of {per_batch * accumulation} samples, once {before[0]}")
        elif before[1] != world_size:
            log.info(f"           world size {world_size}, once {before[1]}: other rounding")
    meter = Meter(own.get("meter"))
    last_step = find_last_step(settings.train, per_epoch)

    size = sum(parameter.numel() for parameter in model.parameters())
    log.info(f"model      {size:,} parameters, on {world_size} x {helper.device().type}")
    log.info(f"data       {task.describe()}")
    limits = Limits(first_step, last_step, settings.train.max_seconds)
    log_folder = environment.log_dir / environment.run_id
    progress = Progress(log_folder, task.unit, limits, enabled=environment.is_main)
    validation_loss = None
    is_over, is_stopped = last_step is not None and step >= last_step, False
    helper.beat(step, saved=step if saved else None, hang_seconds=settings.distributed.hang_seconds)
    while not (is_over or is_stopped):
        rate = learning_rate(step, settings.train, last_step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for micro in range(accumulation):
            batch = move(next(batches), helper.device())
            helper.beat(step)  # here and below: a rank that gets stuck is known by its last beat
            # Gradients travel between the ranks once a step, with the last micro-batch.
            with helper.no_sync(model, enabled=micro < accumulation - 1):
                with autocast(settings):
                    loss = task.loss(model, batch)
                helper.beat(step)
                if micro == accumulation - 1:
                    stop.ask()
                (loss / accumulation).backward()  # type: ignore[no-untyped-call]
            meter.add(step + 1, loss, task.weight(batch))
        if settings.train.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), settings.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        helper.beat(step)

        is_over = step == last_step
        is_stopped = stop.agreed() and not is_over
        is_logged = is_over or step == 1 or step % settings.train.log_every == 0
        is_saved = is_over or is_stopped or is_time(step, settings.checkpoint.every)
        if is_logged or is_saved:
            mean_loss = helper.sync_metrics({"loss": meter.loss()})["loss"]
            if not math.isfinite(mean_loss):
                leave_not_finite(meter, environment)
        if is_logged:
            speed = helper.sync_metrics({"speed": meter.read()})["speed"] * world_size
            with meter.paused():
                values = {"loss": mean_loss, **task.metrics(mean_loss), "lr": rate}
                progress.record(step, {**values, f"{task.unit}_per_second": speed})
        progress.step(step)
        is_validated = is_time(step, settings.train.eval_every, is_over)
        if is_validated:
            with meter.paused():
                # Without its wrapper, for ranks may have different numbers of batches.
                validation_loss = evaluate(task, helper.unwrap(model), validation, settings, step)
                values = {"loss": validation_loss, **task.metrics(validation_loss)}
                progress.record(step, {f"validation_{name}": v for name, v in values.items()})
                progress.draw()
        if is_saved:
            with meter.paused():
                progress.sync()
                epoch, batch_of_epoch = divmod(batches.done, per_epoch)
                place = {"step": step, "epoch": epoch, "samples": batch_of_epoch * per_batch}
                place["global_batch_size"] = per_batch * accumulation
                if is_validated:
                    place["validation_loss"] = validation_loss
                own = {"rng": checkpoint.rng_state(), "meter": meter.state()}
                ranks = checkpoint.gather_ranks(own)
                weights, moments = helper.unwrap(model).state_dict(), optimizer.state_dict()
                saver.save(step, checkpoint.State(weights, moments, place, ranks))
        saver.check()

    saver.wait()
    progress.close()
    if is_stopped:
        log.info(f"stopped    after step {step}, which is saved ({stop.reason or 'another rank'})")
        if "LAUNCH_COMMAND" not in os.environ:  # else the launcher says it
            log.info(resume_line(environment))
        helper.barrier()  # some time after the first has gone the launcher ends those that are left
        return STOPPED
    if environment.is_main:
        speed_text = f"{meter.speed() * world_size:,.0f} {task.unit}/s"
        time = timedelta(seconds=round(meter.wall()))
        print(f"done       {step} steps, {step - first_step} in {time}, {speed_text}")
        if validation_loss is not None:
            for label, text in task.summary(helper.unwrap(model), validation_loss):
                print(f"{label:<10} {text}".replace("\n", "\n" + 11 * " "))
        print(f"checkpoint {run_folder / f'step-{step}'}")
        print(f"logs       {log_folder}: metrics.jsonl, loss.png, tensorboard")
        print(resume_line(environment))
    return 0


def find_checkpoint(
    resume: str, run_folder: Path, *, is_again: bool = False
) -> checkpoint.State | None:
    """Return what the run goes on from: its own newest, else, for `resume: PATH`, what is there.

    Where it `is_again`, restarted after a failure, `never` is said of its first start.
    """
    if resume == "never" and not is_again:
        if checkpoint_files.steps(run_folder):
            raise SettingsError(f"resume: never, but {run_folder} is not empty; use a new RUN_ID")
        return None
    state = checkpoint.load(run_folder)
    if state is None and resume not in ("auto", "never"):
        state = checkpoint.load(Path(resume))
        if state is None:
            raise SettingsError(f"resume: {resume} holds no checkpoint")
    return state


def settle_buckets(task: Task, model: nn.Module, batch_size: int, settings: Settings) -> None:
    """Let DDP order its buckets, which it does after its first backward pass.

    The order decides how more than two ranks' gradients are rounded. Without this the first step
    after a resume would be rounded otherwise than in a run that was never stopped.
    """
    before = [buffer.clone() for buffer in model.buffers()]
    samples = [task.train[index] for index in range(batch_size)]
    with autocast(settings):
        loss = task.loss(model, move(default_collate(samples), helper.device()))
    loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)


def fill(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Give the model a checkpoint's weights."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        cause = f"the checkpoint is of another model ({str(error).splitlines()[-1].strip()})"
        raise SettingsError(f"model: {cause}; use its settings, or another RUN_ID") from None


def resume_line(environment: Environment) -> str:
    dropped = ("--local-rank", "--local_rank", "resume=never")
    words = [word for word in sys.argv if not word.startswith(dropped)]
    command = os.environ.get("LAUNCH_COMMAND") or shlex.join(["python", *words])
    return f"resume     RUN_ID={shlex.quote(environment.run_id)} {command}"


def choose_batch_size(train: Train, world_size: int, saved: checkpoint.State | None) -> int:
    """Return the samples of a process's micro-batch; a resumed run keeps its global batch."""
    if not (saved and train.batch_size and len(saved.ranks) != world_size):
        return train.batch_size_on(world_size)
    samples, shares = saved.progress["global_batch_size"], world_size * train.grad_accumulation
    if samples % shares:
        cause = f"the run's batches of {samples} samples do not divide by {shares}"
        raise SettingsError(f"resume: {cause}; resume it with another number of processes")
    return int(samples // shares)


def leave_not_finite(meter: Meter, environment: Environment) -> NoReturn:
    """End the run in the name of the rank whose loss was the first to be no number."""
    first, value = meter.not_finite or (math.inf, 0.0)
    steps = [first] * environment.world_size
    if environment.world_size > 1:
        torch.distributed.all_gather_object(steps, first)
    if environment.rank == steps.index(min(steps)):
        cause = f"the loss of step {first} is {value} on rank {environment.rank}"
        cure = "try a lower train.learning_rate, and look at the data of that step"
        raise FloatingPointError(f"{cause}; {cure} [loss-not-finite]")
    with contextlib.suppress(RuntimeError):  # until the launcher ends this one, too
        helper.barrier()
    helper.finish(1)


def autocast(settings: Settings) -> torch.autocast:
    enabled = settings.distributed.mixed_precision.enabled and helper.device().type == "cuda"
    return torch.autocast(helper.device().type, dtype=torch.bfloat16, enabled=enabled)


def is_time(step: int, every: int, is_over: bool = False) -> bool:
    return every > 0 and (is_over or step % every == 0)


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, own_share: DataLoader[Any], settings: Settings, step: int
) -> float:
    """Return the mean loss over all ranks' shares, each term counted once."""
    model.eval()
    total, weight = 0.0, 0
    for batch in own_share:
        helper.beat(step)
        batch = move(batch, helper.device())
        with autocast(settings):
            loss = task.loss(model, batch)
        total += loss.item() * task.weight(batch)
        weight += task.weight(batch)
    model.train()
    return helper.sync_metrics({"loss": total / max(weight, 1)}, weight=weight)["loss"]


if __name__ == "__main__":
    code = train(arguments, settings)
    helper.finish(code)  # train()'s loaders are gone by now, and their worker processes with them
