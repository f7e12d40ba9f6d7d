"""DeepSpeed's own initialization, modelled on its CIFAR example: it reads RANK itself."""

import argparse

import deepspeed
import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=3)
    parser = deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(arguments.steps):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    print(f"rank {rank} of {world}: loss {loss:.6f}")
    deepspeed.comm.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
