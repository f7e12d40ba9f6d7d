"""Sets variables before it imports torch, as many scripts do, and logs to its own file."""

import logging
import os

os.environ["OMP_NUM_THREADS"] = "3"
os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
logging.basicConfig(filename=f"rank{rank}.log", level=logging.INFO, format="%(message)s")
dist.init_process_group("gloo")
group = dist.new_group([0, 1])
seen = [None] * dist.get_world_size()
dist.all_gather_object(seen, {"rank": rank, "threads": torch.get_num_threads()}, group=group)
logging.info("%s %s", seen, dist.get_debug_level())
print(seen, dist.get_debug_level())
dist.destroy_process_group()
