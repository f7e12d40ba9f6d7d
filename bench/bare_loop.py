"""A minimal loop that trains the built-in model; `make bench-step` compares train.py with it.

bench/step.py starts and configures it, and turns.py decides when it takes its steps. STRATEGY,
ACCUMULATE, COMPILE and RECOMPUTE select what a case needs. The loop is plain torch.
"""

import contextlib
import functools
import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from turns import Turns

from training.settings import load
from training.tasks.language_model import LanguageModelTask


def main() -> None:
    steps, samples, accumulate = (
        int(os.environ[name]) for name in ("STEPS", "SAMPLES", "ACCUMULATE")
    )
    settings = load(Path(os.environ["CONFIG"]))
    strategy = os.environ["STRATEGY"]
    if strategy != "single":
        torch.distributed.init_process_group("gloo")
        samples //= torch.distributed.get_world_size()
    task = LanguageModelTask(settings)
    text = torch.frombuffer(task.train.read(0, task.train.size), dtype=torch.uint8)
    context = task.train.context
    model = wrap(task.model(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    turns = Turns()
    for step in range(steps):
        turns.before(step)
        for micro in range(1, accumulate + 1):
            starts = torch.randint(len(text) - context - 1, (samples // accumulate,)).tolist()
            batch = torch.stack([text[at : at + context + 1] for at in starts])
            with waiting(model, is_last=micro == accumulate):
                loss = task.loss(model, batch) / accumulate
                loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    turns.pass_on()
    os._exit(0)


def wrap(model: nn.Module, strategy: str) -> nn.Module:
    """Return the model wrapped for a strategy: single, ddp, fsdp, or fsdp in groups of 2."""
    blocks = [*model.blocks.layers]  # type: ignore[misc, union-attr]
    for block in blocks:
        if os.environ.get("RECOMPUTE"):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if os.environ.get("COMPILE"):
            block.forward = torch.compile(block.forward)
    if strategy == "single":
        return model
    if strategy == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard

    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    if strategy == "fsdp by 2":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def waiting(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Reduce the gradients across the ranks only in the step's last backward pass."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
    return contextlib.nullcontext()


if __name__ == "__main__":
    main()
