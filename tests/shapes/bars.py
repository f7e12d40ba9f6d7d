"""tqdm's bars on stdout and stderr, with lines printed in between, as in most training loops."""

import sys

import torch
import torch.distributed as dist
from tqdm.auto import tqdm, trange

dist.init_process_group("gloo")
rank = dist.get_rank()
FORMAT = "{desc}: {n_fmt}/{total_fmt} {bar:10}{postfix}"
for epoch in trange(2, bar_format=FORMAT, file=sys.stdout, disable=rank != 0, desc="epochs"):
    bar = tqdm(range(5), bar_format=FORMAT, mininterval=0, disable=rank != 0, desc=f"epoch {epoch}")
    for step in bar:
        loss = torch.tensor(float(step + rank))
        dist.all_reduce(loss)
        bar.set_postfix(loss=f"{loss:.1f}")
    tqdm.write(f"rank {rank}: epoch {epoch} done")
dist.destroy_process_group()
