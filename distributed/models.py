"""This process's device, the types it computes in, and models spread over the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from .collectives import broadcast_weights, count_ranks
from .environment import LauncherError
from .strategy import Sharding, check_strategy
from .torch_internals import COMPILED


def device() -> torch.device:
    """Return the device of this process: its GPU, or the CPU if it has none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def autocast(dtype: str | None) -> torch.autocast:
    """Return a context in which this process's device computes in "bfloat16" or "float16".

    With None, it computes in the tensors' own types. Raises ValueError for any other dtype.
    """
    if dtype not in (None, "bfloat16", "float16"):
        raise ValueError(f"dtype {dtype!r} is unknown; use bfloat16, float16 or None")
    chosen = getattr(torch, dtype) if dtype else None
    return torch.autocast(device().type, chosen, enabled=dtype is not None)


def grad_scaler(dtype: str | None, **options: Any) -> Scaler:
    """Return torch's GradScaler for a loss computed in `autocast(dtype)`, with its `options`.

    It scales only for float16, whose small gradients would vanish; otherwise it does nothing.
    """
    return Scaler(device().type, enabled=dtype == "float16", **options)


class Scaler(torch.amp.GradScaler):
    """A GradScaler that counts the steps that it skips because a gradient is not finite."""

    skipped: int | Tensor = 0  # since its creation; a tensor, so as not to wait for the GPU

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale; if it falls, the step was skipped, and is counted."""
        one = torch.ones((), device=device())
        before = self.scale(one)  # 1 if the scaler is disabled
        super().update(new_scale)
        self.skipped = self.skipped + (self.scale(one) < before)


@overload
def setup_distributed_models(model: nn.Module, /, **options: Any) -> nn.Module: ...
@overload
def setup_distributed_models(*models: nn.Module | None, **options: Any) -> tuple[Any, ...]: ...
def setup_distributed_models(
    *models: nn.Module | None,
    strategy: str = "auto",
    sharding: Sharding | None = None,
    sync_batchnorm: bool = False,
    **options: Any,
) -> Any:
    """Move models to this process's device and wrap them; every rank gets rank 0's weights.

    All ranks must call this, before they create optimizers. A model without trainable parameters is
    not wrapped. An AveragedModel is sharded by fsdp, but not wrapped by DDP. None stays None.

    Args:
        strategy: "ddp": one process per GPU; "fsdp": the same, each with a part of the model;
            "dp": one process with all GPUs; "single": one process; "auto": ddp if there are several
            processes.
        sharding: how fsdp shards the model.
        sync_batchnorm: compute the statistics of each BatchNorm over the batches of all ranks.
        options: DDP's own, such as `find_unused_parameters`, for a model that skips parameters in
            some steps, or `static_graph`; other strategies ignore them.

    Returns one model, or a tuple for several. Raises ValueError for an unknown strategy, and
    LauncherError for one that cannot run here, or for sync_batchnorm on CPUs.
    """
    world_size = count_ranks()
    check_strategy(strategy, world_size)
    sync_batchnorm = sync_batchnorm and world_size > 1
    if sync_batchnorm and device().type == "cpu":
        raise LauncherError(
            "sync_batchnorm needs GPUs: torch's SyncBatchNorm does not compute on CPUs; "
            "pass sync_batchnorm=torch.cuda.is_available()"
        )

    def move_and_wrap(model: nn.Module) -> nn.Module:
        is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
        if sync_batchnorm and not is_frozen:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]

        if strategy == "fsdp" and world_size > 1 and not is_frozen:
            from . import fsdp

            fsdp.shard(unwrap(model), [*blocks(model)], device(), sharding or Sharding())
            return model

        model = model.to(device())
        if world_size == 1:
            is_spread = strategy == "dp" and torch.cuda.device_count() > 1 and not is_frozen
            return DataParallel(model) if is_spread else model
        if is_frozen or isinstance(model, AveragedModel):  # no gradients that DDP could exchange
            broadcast_weights(model)
            return model
        return DistributedDataParallel(
            model,
            device_ids=[device()] if device().type == "cuda" else None,
            # The first avoids a copy of the gradients.
            **{"gradient_as_bucket_view": True, **options},
        )

    wrapped = tuple(None if model is None else move_and_wrap(model) for model in models)
    return wrapped[0] if len(wrapped) == 1 else wrapped


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module without the wrappers of DDP, DataParallel and torch.compile."""
    return [*_layers(model)][-1]


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, then what its wrappers hold, from the outside in."""
    yield model
    is_parallel = isinstance(model, DistributedDataParallel | DataParallel)
    inner = dict(model.named_children()).get("module" if is_parallel else COMPILED)
    if inner is not None:
        yield from _layers(inner)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the repeated parts of a model: the contents of its outermost ModuleLists.

    Lists within these lists are not parts themselves, but their contents are. A layer that is in a
    list several times is yielded once.
    """
    for child in model.children():  # each once
        is_block = isinstance(model, nn.ModuleList) and not isinstance(child, nn.ModuleList)
        yield from [child] if is_block else blocks(child)


def is_sharded(model: nn.Module) -> bool:
    """Return whether each rank holds only a part of the model; then all must compute together."""
    return hasattr(unwrap(model), "set_requires_gradient_sync")  # of FSDPModule


@contextlib.contextmanager
def no_sync(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Exchange no gradients in the body; the first backward pass after it exchanges them.

    The body must include the forward pass: DDP decides there. If not `enabled`, this does nothing.
    """
    with contextlib.ExitStack() as stack:
        for layer in _layers(model) if enabled else ():
            if isinstance(layer, DistributedDataParallel):
                stack.enter_context(layer.no_sync())
            elif is_sharded(layer):
                choose: Any = layer.set_requires_gradient_sync
                choose(False)
                stack.callback(choose, True)
        yield


def clip_gradients(model: nn.Module, norm: float) -> Tensor:
    """Scale the gradients down to a total 2-norm of at most `norm`; returns the norm before that.

    The result is a tensor without dimensions. All ranks must call this; all get the same value.
    With a scaler, call its `unscale_` first.
    """
    before = nn.utils.clip_grad_norm_(model.parameters(), norm)
    # A DTensor holds only this rank's part.
    return getattr(before, "full_tensor", before.detach)()
