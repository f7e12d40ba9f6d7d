"""A breakpoint that was left in the script, on rank 0; the others wait at the barrier."""

import os

import torch.distributed as dist

dist.init_process_group("gloo")
answer = 41
if os.environ["RANK"] == "0":
    breakpoint()
dist.barrier()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {answer}")
dist.destroy_process_group()
