"""Training loops that know nothing of this project, one for each way of making a step.

python own_loops.py KIND STEP RANK [WHERE]: in step STEP rank RANK sleeps for ever, before the batch
(data, the default) or in a validation of its own (validation).
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
    return torch.randn(4, 4)


def validate(step: int) -> None:
    if where == "validation" and step == last and dist.get_rank() == stuck:
        time.sleep(1000)


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.01)]
if kind == "two":  # as a GAN has them: the second makes two steps for each of the first
    optimizers += [torch.optim.Adam(model.parameters(), lr=0.01)]
for step in range(10**9):
    for number, optimizer in enumerate(optimizers):
        for _ in range(1 + number):
            for part in range(8 if kind == "accumulated" else 1):
                loss = model(read_batch(step if part == 0 else -1)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if step == 2 and dist.get_rank() == 0:
        print("started", flush=True)
    validate(step)
