"""A module run with -m that imports its neighbours with relative imports, as torchtitan does."""

import argparse
import sys

import torch
import torch.distributed as dist

from .model import build

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("rest", nargs="*")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(build(arguments.width))
    loss = model(torch.ones(2, arguments.width)).sum()
    loss.backward()
    print(f"{__package__} {sys.argv[1:]} rank {dist.get_rank()}: {loss:.6f}")
    dist.destroy_process_group()
