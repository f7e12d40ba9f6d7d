"""Modelled on torchvision's references: replaces print() with one that prints only on rank 0."""

import builtins
import datetime
import os
import time

import torch
import torch.distributed as dist


def silence_others(is_master: bool) -> None:
    plain = builtins.print

    def print(*words: object, force: bool = False, **options: object) -> None:
        if is_master or force:
            plain(*words, **options)

    builtins.print = print


class Meter:
    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def update(self, value: float) -> None:
        self.count, self.total = self.count + 1, self.total + value

    def synchronize(self) -> None:
        both = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(both)
        self.count, self.total = int(both[0]), both[1].item()


if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo", init_method="env://", timeout=datetime.timedelta(minutes=1))
    silence_others(dist.get_rank() == 0)
meter = Meter()
for step in range(5):
    meter.update(step * (dist.get_rank() + 1))
    print(f"step [{step}/5]", force=step == 4)
meter.synchronize()
print(f"mean {meter.total / meter.count:.3f} of {meter.count}")
start = time.time()
print(f"took {datetime.timedelta(seconds=int(time.time() - start))}")
dist.destroy_process_group()
