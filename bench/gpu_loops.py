"""The built-in model in other training loops, for bench/gpu.py:

    python bench/gpu_loops.py LOOP STEPS FROM_STEP CONFIG [KEY=VALUE...]

LOOP is bare, ddp or fsdp (the bare loop with one rank, and NCCL on a GPU), accelerate, lightning,
or stall (how long a save blocks the loop). All compute as train.py does: in bfloat16 on a GPU, with
compiled blocks, fused AdamW, and input that is read ahead into pinned memory. Prints JSON: tokens
per second after FROM_STEP and peak memory in GB or, for stall, seconds.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, RandomSampler

from distributed.checkpoint import Saver, State
from training.meter import peak_memory
from training.settings import Settings, load
from training.tasks.language_model import LanguageModelTask

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_CUDA else torch.device("cpu")
SAVES = 3


class Training:
    """The model, its optimizer and its data, according to the settings, without any wrapper."""

    def __init__(self, settings: Settings, steps: int) -> None:
        self.task = LanguageModelTask(settings)
        self.model: nn.Module = self.task.model()
        if settings.train.compile:
            for block in self.model.blocks.layers:
                block.forward = torch.compile(block.forward)
        self.samples = settings.train.batch_size_on(1)
        self.sampler = RandomSampler(self.task.train, num_samples=steps * self.samples)
        self.loader = DataLoader(
            self.task.train,
            self.samples,
            sampler=self.sampler,
            num_workers=settings.data.num_workers,
            pin_memory=settings.data.pin_memory and IS_CUDA,
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)


class Clock:
    """Times the steps after `from_step`; waits for the GPU only at the start and at the end."""

    def __init__(self, steps: int, from_step: int) -> None:
        self._marks = {from_step: 0.0, steps: 0.0}

    def tick(self, step: int) -> None:
        """Record that a step is done; the first is step 1."""
        if step in self._marks:
            if IS_CUDA:
                torch.cuda.synchronize()
            self._marks[step] = time.perf_counter()

    def result(self, training: Training) -> dict[str, float]:
        (first, start), (last, end) = self._marks.items()
        tokens = (last - first) * training.samples * training.task.train.context
        return {"tokens_per_second": tokens / (end - start), "memory_gb": peak_memory() / 1e9}


def bare(training: Training, clock: Clock, wrap: Callable[[nn.Module], nn.Module]) -> None:
    training.model.to(DEVICE)
    model = wrap(training.model)
    optimizer = training.make_optimizer()
    for step, batch in enumerate(training.loader, 1):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=IS_CUDA):
            loss = training.task.loss(model, batch.to(DEVICE, non_blocking=True))
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick(step)


def join() -> None:
    """Create a process group of one rank."""
    backend = "nccl" if IS_CUDA else "gloo"
    torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def with_ddp(model: nn.Module) -> nn.Module:
    join()
    torch._dynamo.config.optimize_ddp = False  # as in train.py: blocks are compiled separately
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def with_fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    join()
    for module in (*model.blocks.layers, model):  # type: ignore[misc, union-attr]
        fully_shard(module)
    return model


def with_accelerate(training: Training, clock: Clock) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(
        mixed_precision="bf16" if IS_CUDA else "no",
        cpu=not IS_CUDA,
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    optimizer = training.make_optimizer()
    model, optimizer, loader = accelerator.prepare(training.model, optimizer, training.loader)
    for step, batch in enumerate(loader, 1):
        with accelerator.autocast():
            loss = training.task.loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick(step)


def with_lightning(training: Training, clock: Clock) -> None:
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return training.task.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return training.make_optimizer()

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            clip_grad_norm_(self.model.parameters(), 1.0)  # Lightning's own rejects fused AdamW

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            clock.tick(index + 1)

    trainer = lightning.Trainer(
        plugins=LightningEnvironment(),  # otherwise it looks for MPI, and can hang
        accelerator="gpu" if IS_CUDA else "cpu",
        devices=1,
        precision="bf16-mixed" if IS_CUDA else "32-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), training.loader)


def time_saves(training: Training) -> dict[str, float]:
    """Return how long the last of several saves blocks the loop, for ours and for torch.save."""
    training.model.to(DEVICE)
    optimizer = training.make_optimizer()
    batch = next(iter(training.loader)).to(DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=IS_CUDA):
        loss = training.task.loss(training.model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder, "run"), keep_last=SAVES)

        def ours(step: int) -> None:
            states = training.model.state_dict(), optimizer.state_dict()
            saver.save(step, State(*states, progress={"step": step}, ranks=[]))

        def torchs(step: int) -> None:
            states = training.model.state_dict(), optimizer.state_dict()
            torch.save(states, Path(folder, "torch.pt"))

        found = {}
        for name, save in {"ours": ours, "torch.save": torchs}.items():
            for step in range(1, SAVES + 1):
                if IS_CUDA:
                    torch.cuda.synchronize()
                began = time.perf_counter()
                save(step)
                found[name] = time.perf_counter() - began
                saver.wait()
    return found


LOOPS: dict[str, Callable[[Training, Clock], None]] = {
    "bare": functools.partial(bare, wrap=lambda model: model),
    "ddp": functools.partial(bare, wrap=with_ddp),
    "fsdp": functools.partial(bare, wrap=with_fsdp),
    "accelerate": with_accelerate,
    "lightning": with_lightning,
}


def main() -> None:
    name, steps, from_step, config, *settings = sys.argv[1:]
    torch.manual_seed(1)
    training = Training(load(Path(config), settings), int(steps))
    if name == "stall":
        print(json.dumps(time_saves(training)))
        return
    clock = Clock(int(steps), int(from_step))
    LOOPS[name](training, clock)
    print(json.dumps(clock.result(training)), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
