"""The task's model, prepared for the ranks: strategy, precision, evaluation."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader, default_collate

from distributed import torch as helper
from distributed.collectives import count_ranks, own_rank
from distributed.environment import Environment
from distributed.torch_internals import compile_beside_ddp
from training.arguments import refuse_alone
from training.asked import refuse_misspelt
from training.batches import Batches, fill_up, move, share_of
from training.config_file import SettingsError, Tree
from training.settings import Settings, Train
from training.tasks import Task, evaluate, loss_of, metrics_of, scores_of

_log = logging.getLogger(__name__)


def make_model(task: Task, settings: Settings, cache: Path | None) -> nn.Module:
    """Return the model on this rank's device, wrapped according to the settings.

    All ranks must call this. The results of torch.compile are kept in `cache`, for all ranks and
    later starts of the run, by setting TORCHINDUCTOR_CACHE_DIR; without one, in torch's own. Rank 0
    logs a warning if mixed precision is on without a GPU. Raises SettingsError for a misspelt key
    of `model:`.
    """
    model = task.model()
    refuse_misspelt(settings.model, settings.task)
    if settings.train.compile and cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache.absolute()))
    set_up_blocks(model, settings.train)

    chosen = settings.distributed
    is_ignored = chosen.mixed_precision.enabled and not is_mixed(settings)
    if is_ignored and helper.is_main_process():
        _log.warning("precision  float32: mixed precision needs a GPU")

    return helper.setup_distributed_models(
        model,
        strategy=chosen.strategy,
        find_unused_parameters=chosen.find_unused_parameters,
        static_graph=chosen.static_graph,
        bucket_cap_mb=chosen.bucket_cap_mb,
        sharding=helper.Sharding(dtype=dtype_of(settings), **chosen.fsdp.as_tree()),
    )


def _count_buffers(environment: Environment, *, is_sharded: bool, is_copied: bool) -> int:
    """Return how many buffers this node holds: two, filled in turn, and others for copies.

    If sharded, each rank has two and, with several nodes, two for a rank of another node.
    """
    if is_sharded:
        return (4 if is_copied else 2) * environment.local_world_size
    return 3 if is_copied and environment.is_main else 2  # a copy is sent from the third


def check_snapshot_memory(model: nn.Module, settings: Settings, environment: Environment) -> None:
    """Log the memory that snapshots need on this node; raises SettingsError if they do not fit.

    Does nothing without snapshots, and on a rank that holds none. Logs a warning if there is no
    node agent.
    """
    every = settings.checkpoint.snapshot_every
    is_sharded = settings.checkpoint.format == "sharded"
    is_copied = environment.world_size > environment.local_world_size  # to another node
    keeps_copy = (environment.node_rank, environment.local_rank) == (1, 0)  # of rank 0's
    is_holder = environment.is_main or is_sharded or keeps_copy
    if not every or not is_holder:
        return
    if not environment.heartbeat_file:
        _log.warning("snapshots  none: this launcher has no node agent that could keep them")
        return

    def size_of(tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of what is copied: of a sharded model, this rank's part."""
        parts = (getattr(one, "to_local", one.detach)() for one in tensors)
        return sum(one.nbytes for one in (parts if is_sharded else tensors))

    module = helper.unwrap(model)
    trained = [one for one in module.parameters() if one.requires_grad]
    size = size_of(module.state_dict().values()) + 2 * size_of(trained)  # AdamW: two moments
    needed = size * _count_buffers(environment, is_sharded=is_sharded, is_copied=is_copied)
    # After a restart, the snapshots already occupy that memory.
    if needed > (free := free_memory()) and environment.restart_count == 0:
        raise SettingsError(
            f"checkpoint.snapshot_every: snapshots take {needed / 1e9:.1f} GB of memory, "
            f"but only {free / 1e9:.1f} GB are free; set it to 0"
        )

    _log.info(f"snapshots  every {every} steps, in {needed / 1e6:,.0f} MB of memory")


def free_memory() -> int:
    """Return the bytes of memory free on this machine, or in its cgroup (v2) if that is less."""
    (kilobytes,) = re.findall(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
    free = [int(kilobytes) * 1024]
    with contextlib.suppress(OSError, ValueError, LookupError):  # another version of cgroups
        (own,) = re.findall(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        group = Path("/sys/fs/cgroup", own)
        for one in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # it has no limit ("max")
                most, used = ((one / f"memory.{name}").read_text() for name in ("max", "current"))
                free.append(int(most) - int(used))
    return max(0, min(free))


@contextlib.contextmanager
def follow_config(optimizer: Optimizer, settings: Train, before: Tree) -> Iterator[None]:
    """After the body, set a changed train.weight_decay in the groups that follow this setting.

    The body loads the optimizer, with the saved value; `before` holds the saved `train` settings.
    """
    # Noted before the body: the groups of older checkpoints lack the mark.
    ours = ["follows_config" in group for group in optimizer.param_groups]
    yield
    for group, is_ours in zip(optimizer.param_groups, ours, strict=True):
        if is_ours and before["weight_decay"] != settings.weight_decay:
            group["weight_decay"] = settings.weight_decay


def set_up_blocks(model: nn.Module, settings: Train) -> None:
    """Set up the recomputation of activations and the compilation of each block, as settings say.

    Replaces the `forward` of blocks: nn.Module.compile() would have no effect on torch's own
    modules. Without blocks, warns that nothing is recomputed, and compiles the whole model.
    """
    chosen = settings.activation_checkpointing
    blocks = [*helper.blocks(model)]
    if chosen != "none" and not blocks and helper.is_main_process():
        _log.warning("recompute  nothing: the model has no blocks (nn.ModuleList)")
    elif chosen != "none":
        interval = 1 if chosen == "full" else chosen  # N: every Nth block
        for block in blocks[::interval]:
            block.forward = functools.partial(recompute, block.forward, use_reentrant=False)

    if settings.compile:
        if blocks:  # small graphs: DDP overlaps with the backward pass without splitting them
            compile_beside_ddp()
        for block in blocks or [model]:
            block.forward = torch.compile(block.forward)


def validate(
    task: Task, model: nn.Module, batch_size: int, settings: Settings, step: int
) -> dict[str, float]:
    """Return each metric's mean over the validation data, on all ranks; all must call this.

    Copies rank 0's buffers to all ranks. Beats with the step before each batch.
    """
    world_size = count_ranks()
    share = share_of(task.validation, own_rank(), world_size)
    # Without a generator of its own, the loader would draw a number from the training's.
    generator = torch.Generator()
    loader = DataLoader(share, batch_size, collate_fn=task.collate, generator=generator)
    for buffer in model.buffers():  # such as BatchNorm's: rank 0's, which are saved
        buffer.copy_(helper.broadcast(buffer))
    in_step = world_size if helper.is_sharded(model) else 1
    return mean_metrics(task, model, fill_up(loader, task.validation, in_step), settings, step)


@torch.no_grad()
def mean_metrics(
    task: Task,
    model: nn.Module,
    batches: Iterable[tuple[Any, bool]],
    settings: Settings,
    step: int | None = None,
) -> dict[str, float]:
    """Return each metric's mean over the batches that count, on all ranks. All must call this.

    Beats with the step before each batch. The result includes the task's `metrics` of the loss, but
    no metric without terms. The trial before the first step has no step: it does not beat, and
    metrics without terms are 0.
    """
    module = helper.unwrap(model)  # ranks can have different numbers of batches
    modes = {one: one.training for one in module.modules()}  # the task may have frozen some
    module.eval()

    names = dict[str, None]()  # in their order
    sums: defaultdict[str, float] = defaultdict(float)  # also of the weights
    for batch, counts in batches:
        if step is not None:  # no limit applies before the first step
            helper.beat(step)
        with helper.autocast(dtype_of(settings)):
            found = evaluate(task, module, move(batch, helper.device()))
        for key, (total, weight) in found.items():
            name = str(key)  # a task may use numbers, or an Enum
            names[name] = None
            sums[f"{name} sum"] += counts * float(total)
            sums[f"{name} weight"] += counts * float(weight)
    for one, is_training in modes.items():
        one.training = is_training

    means = helper.sync_metrics(sums)
    values = {}
    for name in names:
        weight = means[f"{name} weight"]
        if weight or step is None:
            values[name] = means[f"{name} sum"] / (weight or 1)
    return values | (metrics_of(task, values["loss"]) if "loss" in values else {})


def try_evaluation(task: Task, model: nn.Module, batch_size: int, settings: Settings) -> None:
    """Evaluate one batch, so that mistakes in `evaluate` and `best` show before the first step.

    Does nothing without validations. Otherwise, all ranks must call this.
    """
    if settings.train.eval_every:
        data: Any = task.validation
        samples = [data[index % len(data)] for index in range(batch_size)]
        batch = (task.collate or default_collate)(samples)
        scores_of(task, mean_metrics(task, model, [(batch, True)], settings))


def fix_bucket_order(
    task: Task, model: nn.Module, batch_size: int, settings: Settings, environment: Environment
) -> None:
    """Run one backward pass, after which DDP puts its gradient buckets in their final order.

    With more than two ranks, the order decides how sums are rounded. The first step after a resume
    must be rounded like the same step of an uninterrupted run. This restores the buffers and clears
    the gradients, but draws random numbers. It reads the first training batch, from a stream of its
    own, and exits with 2 if there is none.
    """
    if count_ranks() <= 2 or helper.is_sharded(model):
        return

    before = [buffer.clone() for buffer in model.buffers()]
    in_this_process = replace(settings, data=replace(settings.data, num_workers=0))  # a fast start
    batches = Batches(task, batch_size, in_this_process, environment)
    with refuse_alone(environment):
        batch = move(next(batches), helper.device())
    with batches.naming_samples(), helper.autocast(dtype_of(settings)):
        loss = loss_of(task, model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)


def describe_model(model: nn.Module) -> str:
    """Return the model's size and where it runs, for the log."""
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"{size:,} parameters, on {count_ranks()} x {helper.device().type}"


def is_mixed(settings: Settings) -> bool:
    """Return whether this process computes in mixed precision: only if set, and with a GPU."""
    return settings.distributed.mixed_precision.enabled and helper.device().type == "cuda"


def dtype_of(settings: Settings) -> str | None:
    """Return the type to compute in, for the helper's autocast and grad_scaler; None: float32."""
    return settings.distributed.mixed_precision.dtype if is_mixed(settings) else None
