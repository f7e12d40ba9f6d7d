"""The model is still alive when the process group is gone; an atexit function prints."""

import atexit

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    atexit.register(print, f"rank {dist.get_rank()} leaves")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    print(f"all {int(total)}")


main()
