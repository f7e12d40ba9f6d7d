"""tqdm's bars on stdout and stderr, with lines printed in between, as in most training loops."""

import sys

import torch
import torch.distributed as dist
from tqdm.auto import tqdm, trange

dist.init_process_group("gloo")
rank = dist.get_rank()
FORMAT = "{desc}: {n_fmt}/{total_fmt} {bar:10}{postfix}"
# mininterval=0 draws every step, however much time has passed.
bars = {"bar_format": FORMAT, "mininterval": 0, "disable": rank != 0}
for epoch in trange(2, file=sys.stdout, desc="epochs", **bars):
    bar = tqdm(range(5), desc=f"epoch {epoch}", **bars)
    for step in bar:
        loss = torch.tensor(float(step + rank))
        dist.all_reduce(loss)
        bar.set_postfix(loss=f"{loss:.1f}")
    tqdm.write(f"rank {rank}: epoch {epoch} done")
dist.destroy_process_group()
