"""GPT-2 124M in a bare loop with some settings changed, for bench/gpu_settings.py:

    python bench/gpu_variants.py CHANGES [KEY=VALUE...]

CHANGES is JSON, such as {"batch": 64}: fields of Variant. Prints JSON: tokens per second, MFU, peak
memory, the seconds of the first steps beyond those of others, waits for the GPU, and the loss.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_loops import DEVICE, IS_CUDA, Clock, Training
from gpu_runs import GPT2_CONFIG
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as recompute

from training.meter import PEAKS
from training.settings import load

WARM_UP, TIMED, WATCHED = (10, 50, 3) if IS_CUDA else (2, 3, 1)  # steps
CHUNKS = 8  # of a batch, for the loss
SHRINK = 1 if IS_CUDA else 16  # a tiny model's batches are smaller
GRAPH = ("batch", "compiled", "mode", "attention", "views")  # what changes the compiled code


@dataclass(frozen=True)
class Variant:
    """How the loop computes; the defaults are the base line."""

    batch: int = 32  # samples
    # What torch.compile gets: nothing, blocks, model, or step (the model and the loss in one
    # graph). With `loss`, also the last matrix and the loss; with `chunks`, these in parts, whose
    # logits are computed again in the backward pass.
    compiled: str = "blocks"
    mode: str = "default"  # of torch.compile
    attention: str = ""  # the name of an SDPBackend; empty: torch chooses
    views: bool = False  # attention reads q, k and v where the projection wrote them
    precision: str = "highest"  # of float32 matrices
    reduced: bool = True  # sums in bfloat16 where a matrix product is split
    ahead: bool = False  # each batch is moved during the step before, on a stream of its own
    fused: bool = True  # AdamW; otherwise foreach
    clip: str = "foreach"  # or each, or none


def attend(own: Any, x: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
    """Replace MultiheadAttention.forward, which copies q, k and v; causal, without dropout."""
    batch, length, width = x.shape
    joint = F.linear(x, own.in_proj_weight, own.in_proj_bias)
    parts = joint.view(batch, length, 3, own.num_heads, width // own.num_heads)
    q, k, v = parts.transpose(1, 3).unbind(2)  # each [batch, heads, length, width of a head]
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return own.out_proj(found.transpose(1, 2).reshape(x.shape)), None


def sum_of_losses(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets, reduction="sum")


def split_loss(model: Any, end: Callable[..., Tensor], chunks: int, batch: Tensor) -> Tensor:
    """Return LanguageModelTask.loss, computed by `end` from the last layer's output."""
    text, targets = batch[:, :-1], batch[:, 1:].flatten()
    length = text.shape[1]
    mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
    x = model.embedding(text) + model.position(torch.arange(length, device=text.device))
    x = model.blocks(x, mask=mask, is_causal=True).flatten(0, 1)
    if chunks > 1:
        end = functools.partial(recompute, end, use_reentrant=False)
    pairs = zip(x.chunk(chunks), targets.chunk(chunks), strict=True)
    losses = [end(part, model.embedding.weight, aims) for part, aims in pairs]
    return torch.stack(losses).sum() / len(targets)


def can_compile() -> bool:
    return IS_CUDA or shutil.which(os.environ.get("CXX", "g++")) is not None


class Loop:
    """The loop of gpu_loops.py, with a variant's changes."""

    def __init__(self, variant: Variant, training: Training) -> None:
        self.variant = variant
        self.training = training
        model: Any = training.model.to(DEVICE)
        self.model = model
        for block in model.blocks.layers if variant.views else ():
            block.self_attn.forward = functools.partial(attend, block.self_attn)
        self.compute_loss = self._compile()
        self.optimizer = training.make_optimizer()
        if not variant.fused:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)

    def _compile(self) -> Callable[[Tensor], Tensor]:
        """Compile what the variant names; returns the function that computes the loss."""
        parts = self.variant.compiled.split(", ") if can_compile() else ["nothing"]
        options: dict[str, Any] = {"mode": self.variant.mode}
        is_new = any(getattr(self.variant, name) != getattr(Variant, name) for name in GRAPH)
        if is_new and not IS_CUDA:  # a C++ compiler takes too long for each
            options = {"backend": "aot_eager"}
        model, task = self.model, self.training.task
        for module in model.blocks.layers if "blocks" in parts else [model] * ("model" in parts):
            module.forward = torch.compile(module.forward, **options)

        def plain_loss(batch: Tensor) -> Tensor:
            return task.loss(model, batch)

        if "step" in parts:
            return torch.compile(plain_loss, **options)
        if "loss" in parts or "chunks" in parts:
            end = torch.compile(sum_of_losses, **options)
            return functools.partial(split_loss, model, end, CHUNKS if "chunks" in parts else 1)
        return plain_loss

    def batches(self) -> Iterator[Tensor]:
        """Yield the batches on the device."""
        if self.variant.ahead:
            return move_ahead(self.training.loader)
        return (batch.to(DEVICE, non_blocking=True) for batch in self.training.loader)

    def take_step(self, batch: Tensor) -> Tensor:
        """Take one optimizer step; returns the loss."""
        if self.variant.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=IS_CUDA):
            loss = self.compute_loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.variant.clip != "none":
            foreach = None if self.variant.clip == "foreach" else False
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=foreach)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def move_ahead(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each batch on the GPU, after the copy of the next one has begun on another stream."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    moved: Tensor | None = None
    for batch in batches:
        if moved is not None:
            torch.cuda.current_stream().wait_stream(stream)
            moved.record_stream(torch.cuda.current_stream())
        ready = moved
        with torch.cuda.stream(stream):
            moved = batch.to(DEVICE, non_blocking=True)
        if ready is not None:
            yield ready
    if moved is not None:
        torch.cuda.current_stream().wait_stream(stream)
        yield moved


def count_waits(take_step: Callable[[], object]) -> float | None:
    """Return how often a step waits for the GPU, as torch reports it; None without a GPU."""
    if not IS_CUDA:
        take_step()
        return None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(WATCHED):
            take_step()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in told) / WATCHED


def measure(variant: Variant, settings: Sequence[str]) -> dict[str, Any]:
    """Train in this process; returns what was measured."""
    torch.manual_seed(1)
    torch.set_float32_matmul_precision(variant.precision)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = variant.reduced
    size = max(1, variant.batch // SHRINK)
    tiny = [] if IS_CUDA else ["model.layers=1"]
    words = [*settings, *tiny, f"train.global_batch_size={size}", "train.compile=false"]
    steps = WARM_UP + TIMED
    training = Training(load(Path(GPT2_CONFIG), words), steps + WATCHED + 1)
    loop = Loop(variant, training)
    clock = Clock(steps, WARM_UP)
    batches = loop.batches()
    backend = getattr(SDPBackend, variant.attention, None)

    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
        began = warm = time.perf_counter()
        for step in range(1, steps + 1):
            loss = loop.take_step(next(batches))
            clock.tick(step)
            warm = time.perf_counter() if step == WARM_UP else warm
        found: dict[str, Any] = clock.result(training)
        waits = count_waits(lambda: loop.take_step(next(batches)))
    step_s = training.samples * training.task.train.context / found["tokens_per_second"]
    gpu = torch.cuda.get_device_name() if IS_CUDA else ""
    peak = next((peak for part, peak in PEAKS.items() if part in gpu), 0.0)
    found["mfu"] = found["tokens_per_second"] * training.task.flops / peak if peak else None
    found["compile_s"] = max(0.0, warm - began - WARM_UP * step_s) if can_compile() else None
    return {**found, "waits": waits, "loss": float(loss)}


def main() -> None:
    changes, *settings = sys.argv[1:]
    print(json.dumps(measure(Variant(**json.loads(changes)), settings)), flush=True)


if __name__ == "__main__":
    main()
