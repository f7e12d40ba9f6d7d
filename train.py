"""Train a task on one process or on many.

    python train.py --config config/local3.yaml                         # one process
    python train.py --config config/local3.yaml train.max_steps=100     # with a setting changed
    python train.py --config config/local3.yaml --check                 # only check the config
    python train.py --config config/local3.yaml --evaluate RUN_ID       # only evaluate a checkpoint
    scripts/ssh/launch_singlenode.sh config/local3.yaml 2               # 2 processes here
    torchrun --nproc-per-node 2 train.py --config config/local3.yaml    # the same with torchrun

It trains a task, the built-in one or yours: see training/tasks/__init__.py. A run with the RUN_ID
of an earlier one resumes from that run's newest checkpoint. On SIGTERM, SIGINT, SIGHUP, SIGUSR1 or
SIGUSR2, after train.max_seconds, or if its log folder holds a file `stop`, it saves and exits with
code 75.
"""

from __future__ import annotations

import sys
from pathlib import Path

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH omits this folder
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from training.arguments import read_command_line, refuse, refuse_alone, refuse_together

if __name__ == "__main__":
    arguments, settings = read_command_line(__doc__)  # launch-kit: answers --check

# Importing torch takes over a second, so --check and an invalid config are dealt with before that.
import argparse
import logging
import math
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from distributed import checkpoint
from distributed import torch as helper
from training import resume
from training.batches import START, Batches, check_sizes, move
from training.evaluate import evaluate_checkpoint
from training.meter import Meter, Pace, Stopwatch
from training.model import (
    check_snapshot_memory,
    describe_model,
    dtype_of,
    fix_bucket_order,
    follow_config,
    make_model,
    try_evaluation,
    validate,
)
from training.optimizer import Schedule, choose_optimizer, find_last_step, norm_of_weights
from training.progress import ConsoleLog, Limits, Progress, shown_speed
from training.settings import Settings
from training.tasks import SCORES, load_task, loss_of, metrics_of, scores_of
from training.trackers import RunFacts, Trackers

log = logging.getLogger(__name__)


def evaluate(arguments: argparse.Namespace, settings: Settings) -> int:
    """Evaluate the checkpoint of --evaluate; returns the exit code."""
    environment = join(arguments, settings)
    return evaluate_checkpoint(arguments.evaluate, settings, environment, as_json=arguments.json)


def train(arguments: argparse.Namespace, settings: Settings) -> int:
    """Train to the last step, or until the task or a stop ends the run; returns the exit code."""
    environment = join(arguments, settings)
    run = Run(settings, environment, arguments.launch_command)
    step = run.limits.first_step
    last_step = run.limits.last_step
    validated = dict[str, float]()
    helper.beat(step, saved=run.saved_step, hang_seconds=settings.distributed.hang_seconds)
    is_over = run.is_over or (last_step is not None and step >= last_step)
    is_stopped = False
    if run.unsaved and (is_over or is_due(step, settings.checkpoint.every)):  # not on disk yet
        run.save(step, {n: run.unsaved[n] for n in SCORES if n in run.unsaved})

    while not (is_over or is_stopped):
        rate = run.schedule.before(step)
        run.take_step(step)
        step += 1
        is_stopped = run.stop.agreed()
        run.is_over = run.stop.is_end_agreed
        is_over = step == last_step or run.is_over
        is_stopped = is_stopped and not is_over  # a complete run exits with 0, not 75
        is_logged = is_over or step == 1 or step % settings.train.log_every == 0
        is_validated = is_due(step, settings.train.eval_every, is_over)
        is_asked_for = run.stop.is_save_agreed or is_due(step, settings.checkpoint.every)
        is_saved = is_over or is_stopped or is_asked_for
        is_copied = is_due(step, settings.checkpoint.snapshot_every) and not is_stopped

        if is_logged or is_saved or is_copied:
            loss = run.mean_loss(step)  # raises if not finite: no checkpoint holds such weights
        if is_logged:
            run.record(step, loss, rate)
        run.progress.show_step(step)
        if is_validated:
            validated = run.validate(step)
        scores = scores_of(run.task, validated) if is_validated else {}
        if is_copied:
            run.save(step, scores, in_memory=True)
        if is_saved:
            run.save(step, scores)
        run.saver.check()

    run.saver.wait()
    run.progress.close()
    if is_stopped:
        return run.end_stopped(step)
    if environment.is_main or helper.is_sharded(run.model):
        run.print_summary(step, validated)
    return 0


def join(arguments: argparse.Namespace, settings: Settings) -> helper.Environment:
    """Join the other ranks or exit with 2; set up logging: by default, only rank 0 logs."""
    torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]  # see --log-level
    try:
        environment = helper.init_distributed(
            backend=settings.distributed.backend,
            join_timeout_s=settings.distributed.join_timeout,
            timeout_s=settings.distributed.timeout,
            local_rank=arguments.local_rank,
            nodes=arguments.nodes,
            ranks_per_node=arguments.gpus_per_node,
        )
    except (OSError, ValueError) as error:  # variables, the config, or the other ranks
        refuse(error)

    if environment.is_main or arguments.log_level == "DEBUG":
        handlers = [ConsoleLog(is_result_only=arguments.json)]
        logging.basicConfig(level=arguments.log_level, format="%(message)s", handlers=handlers)
    return environment


class Run:
    """A task, its data, model and optimizer on one rank, as the newest checkpoint left them."""

    def __init__(
        self, settings: Settings, environment: helper.Environment, command: str | None
    ) -> None:
        self.settings = settings
        self.environment = environment
        self.command = command  # the launcher's, which resumes the run; None without a launcher
        is_main = environment.is_main
        self.folder = Path(os.path.expanduser(settings.checkpoint.dir)) / environment.run_id
        self.logs = environment.log_dir / environment.run_id
        self.stop = helper.Stop(
            settings.train.max_seconds,
            save_seconds=settings.checkpoint.every_minutes * 60,
            folder=self.logs if is_main else None,
        )

        helper.seed_everything(settings.seed)  # the same weights on every rank
        with refuse_together(environment):
            saves = settings.checkpoint
            self.saver = checkpoint.Saver(
                self.folder, keep_last=saves.keep_last, enabled=is_main, format=saves.format
            )
        with refuse_together(environment):  # the ranks load together, or not at all
            is_restart = environment.restart_count > 0
            saved = resume.load_checkpoint(settings.resume, self.folder, is_restart=is_restart)
            batch_size = resume.choose_batch_size(settings.train, environment.world_size, saved)
            position = saved.progress if saved else START
            self.unsaved = position if saved and saved.is_snapshot else {}  # it was in memory
            self.saved_step = position["step"] if saved and not saved.is_snapshot else None
            self.task = load_task(settings)
            self.batches = Batches(self.task, batch_size, settings, environment, position)
            self.batch_size = batch_size  # of one rank
            last_step = find_last_step(settings.train, self.batches.per_epoch)

        self._make_model(last_step)
        self.is_over = False  # the task has ended the run
        self.gradient_norm: torch.Tensor | None = None  # before it is clipped, in the newest step
        helper.seed_everything(settings.seed, environment.rank)  # dropout differs from here on
        self.meter = Meter()
        self.stopwatch = Stopwatch(self.model)
        if saved:
            self._resume(saved)
        log.info(f"model      {describe_model(self.model)}")
        log.info(f"data       {self.task.describe()}")

        self.limits = Limits(position["step"], last_step, settings.train.max_seconds)
        self.pace = Pace(self.meter, self.stopwatch)
        hosts = [*dict.fromkeys(self.pace.hosts)]
        facts = RunFacts(environment.run_id, self.logs, settings.as_tree(), hosts, position["step"])
        trackers = Trackers(settings.tracking, facts, asked="tracking" in settings.given)
        self.progress = Progress(self.logs, self.task.unit, self.limits, trackers, enabled=is_main)
        if is_main:
            resume.write_config(settings, self.logs)

    def _make_model(self, last_step: int | None) -> None:
        """Make the model and its optimizer, and try them; if a rank finds a mistake, all exit."""
        with refuse_together(self.environment):
            check_sizes(self.batches.sizes)
            self.model = make_model(self.task, self.settings, self.folder / "compiled")
            check_snapshot_memory(self.model, self.settings, self.environment)
            self.optimizer = choose_optimizer(self.task, self.model, self.settings.train)
            self.schedule = Schedule(self.optimizer, self.task, self.settings.train, last_step)
            self.saver.check_folder()  # no rank waits for the others after this

        self.scaler = helper.grad_scaler(dtype_of(self.settings))
        fix_bucket_order(self.task, self.model, self.batch_size, self.settings, self.environment)
        try_evaluation(self.task, self.model, self.batch_size, self.settings)

    def _resume(self, saved: checkpoint.State) -> None:
        """Load everything in a checkpoint, or exit with 2; log what has changed since."""
        progress = saved.progress
        objects = self._objects()
        if self.environment.rank >= len(saved.ranks):
            del objects["meter"]  # it would count rank 0's losses twice
        before = progress["settings"]["train"]
        following = follow_config(self.optimizer, self.settings.train, before)
        with refuse_together(self.environment), following:
            helper.load(saved, self.model, self.optimizer, **objects)
        # A new run that continues from the checkpoint of a finished run has another id.
        self.is_over = progress.get("ended") == self.environment.run_id
        resume.log_resume(saved, self.progress_now(), self.environment.world_size)

    def _objects(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the model and the optimizer."""
        return {"scaler": self.scaler, "schedule": self.schedule, "meter": self.meter}

    def take_step(self, step: int) -> None:
        """Take one optimizer step: the gradients of each micro-batch, then the update."""
        train = self.settings.train
        for micro in range(train.grad_accumulation):
            is_last = micro == train.grad_accumulation - 1
            with self.meter.loading(), refuse_alone(self.environment):
                batch = move(next(self.batches), helper.device())
            helper.beat(step)  # here and below: the last beat identifies a stuck rank
            with helper.no_sync(self.model, enabled=not is_last):
                precision = helper.autocast(dtype_of(self.settings))
                with self.batches.naming_samples(), self.stopwatch.running(), precision:
                    loss = loss_of(self.task, self.model, batch)
                helper.beat(step)
                if is_last:
                    self.stop.ask()  # the ranks agree during the backward pass
                loss_to_scale = loss / train.grad_accumulation
                self.scaler.scale(loss_to_scale).backward()  # type: ignore[no-untyped-call]
            self.meter.add(step + 1, loss, self.task.weight(batch))

        if train.clip_norm:
            self.scaler.unscale_(self.optimizer)
            self.gradient_norm = helper.clip_gradients(self.model, train.clip_norm)
        self.scaler.step(self.optimizer)  # skipped if a gradient is not finite
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.after()
        if self.task.on_step(step + 1):
            self.stop.end()
        helper.beat(step + 1)

    def mean_loss(self, step: int) -> float:
        """Return the mean loss over all ranks since the last reading; exit unless all is finite."""
        sums = helper.sync_metrics({**self.meter.state_dict(), "norm": norm_of_weights(self.model)})
        mean = sums["loss"] / (sums["terms"] or 1)
        if not math.isfinite(mean + sums["norm"]):
            count = self.settings.train.grad_accumulation
            self.meter.exit_not_finite(
                step, self.environment.rank, lambda back: self.batches.describe(back * count, count)
            )
        return mean

    def record(self, step: int, loss: float, rate: float) -> None:
        """Record the loss, rate, gradient norm, and the ranks' speed. All ranks must call this."""
        pace = self.pace.read(step, self.task.unit, self.task.flops)
        with self.meter.paused():
            values = {"loss": loss, **metrics_of(self.task, loss), "lr": rate}
            if self.gradient_norm is not None:
                values["grad_norm"] = float(self.gradient_norm)
            self.progress.record(step, values | pace)

    def validate(self, step: int) -> dict[str, float]:
        """Validate, record and return the metrics; pass them to the schedule and the task."""
        with self.meter.paused():
            values = validate(self.task, self.model, self.batch_size, self.settings, step)
            self.progress.record(step, {f"validation_{name}": v for name, v in values.items()})
            self.progress.draw()
        self.schedule.validated(values)
        if self.task.on_validation(step, values):
            self.stop.end()
        return values

    def save(self, step: int, scores: Mapping[str, Any], *, in_memory: bool = False) -> None:
        """Copy the state now and, unless `in_memory`, write it to disk in the background."""
        with self.meter.paused():
            if not in_memory:
                self.progress.sync()
            state = {**self._objects(), **self.progress_now(), **scores}
            helper.save(self.saver, step, self.model, self.optimizer, in_memory=in_memory, **state)

    def progress_now(self) -> dict[str, Any]:
        """Return how far the run has got, and with which settings, for a checkpoint."""
        return {
            **self.batches.position(),
            "global_batch_size": self.batches.samples * self.settings.train.grad_accumulation,
            "sizes": self.batches.sizes,
            "settings": self.settings.as_tree(),
            "ended": self.environment.run_id if self.is_over else "",
        }

    def end_stopped(self, step: int) -> int:
        """Report that the run has saved and stopped; returns the exit code."""
        reason = self.stop.reason or "another rank"
        log.info(f"stopped    after step {step}, which is saved ({reason})")
        if self.command is None:  # otherwise the launcher prints it
            log.info(resume.resume_line(self.environment, None))
        return helper.STOPPED

    def print_summary(self, step: int, validated: Mapping[str, float]) -> None:
        """Print how the run ended, on rank 0. All ranks that share a model compute the summary."""
        rows = self.task.summary(helper.unwrap(self.model), validated) if validated else []
        if not self.environment.is_main:
            return

        time = timedelta(seconds=round(self.meter.wall()))
        speed = shown_speed(self.meter.speed() * self.environment.world_size, self.task.unit)
        ended = f", ended by task {self.settings.task}" if self.is_over else ""

        if steps := step - self.limits.first_step:
            print(f"done       step {step}{ended} ({steps} steps this session, {time}), {speed}")
        else:
            cure = "" if self.is_over else "; to train on, raise train.max_steps or train.epochs"
            print(f"done       step {step}{ended}: an earlier start has completed the run{cure}")
        if skipped := int(self.scaler.skipped):
            print(f"skipped    {skipped} steps, because their gradients were not finite in float16")
        for label, text in rows:
            print(f"{label:<10} {text}".replace("\n", "\n" + 11 * " "))
        print(f"checkpoint {self.folder.absolute() / f'step-{step}'}")
        print(f"logs       {self.logs}")
        line = resume.resume_line(self.environment, self.command)
        if line and not self.is_over:
            print(line)


def is_due(step: int, every: int, is_over: bool = False) -> bool:
    """Return whether what is done every `every` steps (0: never), and at the end, is due now."""
    return every > 0 and (is_over or step % every == 0)


if __name__ == "__main__":
    do = train if arguments.evaluate is None else evaluate
    helper.finish(do(arguments, settings))
