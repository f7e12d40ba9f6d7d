"""Training loops without any code from this project, one for each way of taking a step.

python own_loops.py KIND STEP RANK [WHERE]: in step STEP, rank RANK sleeps forever, before it reads
its batch (data, the default) or in its own validation (validation).
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

kind, last, stuck = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
where = sys.argv[4] if sys.argv[4:] else "data"


def read_batch(step: int) -> torch.Tensor:
    if where == "data" and step == last and dist.get_rank() == stuck:
        time.sleep(1000)
    time.sleep(0.01)
    if step == 2 and dist.get_rank() == 0:
        print("started", flush=True)
    return torch.randn(4, 4)


def validate(step: int) -> None:
    if where == "validation" and step == last and dist.get_rank() == stuck:
        time.sleep(1000)


def train_by_hand() -> None:
    """Train with DDP: a step per batch or per 8 batches (accumulated), or two optimizers (two)."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.01)]
    if kind == "two":
        optimizers += [torch.optim.Adam(model.parameters(), lr=0.01)]
    for step in range(10**9):
        for number, optimizer in enumerate(optimizers):
            for _ in range(1 + number):  # the second takes two steps for each step of the first
                for part in range(8 if kind == "accumulated" else 1):
                    loss = model(read_batch(step if part == 0 else -1)).square().mean()
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        validate(step)


def train_with_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(10**9):
        accelerator.backward(model(read_batch(step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        validate(step)


def train_with_lightning() -> None:
    import os

    import lightning

    class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            for step in range(10**9):
                yield read_batch(step - 1)  # Lightning reads one batch ahead

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            validate(index - 1)
            loss: torch.Tensor = self.layer(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        logger=False,
        max_epochs=-1,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(Model(), torch.utils.data.DataLoader(Batches(), batch_size=None))


LOOPS = {"accelerate": train_with_accelerate, "lightning": train_with_lightning}
LOOPS.get(kind, train_by_hand)()
