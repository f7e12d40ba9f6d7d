"""Like nanoGPT: globals as settings, a config file that is run, RANK from the environment."""

import os
from pathlib import Path

import numpy
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size = 12
max_iters = 2
learning_rate = 6e-4
out_dir = "out"
config_keys = [
    k for k, v in globals().items() if not k.startswith("_") and isinstance(v, int | float | str)
]
exec(Path(__file__).with_name("configurator.py").read_text())
config = {k: globals()[k] for k in config_keys}

ddp = int(os.environ.get("RANK", -1)) != -1
init_process_group(backend="gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master = rank == 0
torch.manual_seed(1337 + rank)
if master:
    os.makedirs(out_dir, exist_ok=True)
    numpy.arange(1000, dtype=numpy.uint16).tofile(os.path.join(out_dir, "train.bin"))
torch.distributed.barrier()
data = numpy.memmap(os.path.join(out_dir, "train.bin"), dtype=numpy.uint16, mode="r")
model = DDP(torch.nn.Embedding(1000, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
for step in range(max_iters):
    at = torch.randint(len(data) - 8, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + 8].astype(numpy.int64)) for i in at])
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master:
        print(f"iter {step}: loss {loss.item():.4f}")
if master:
    torch.save(
        {"model": model.module.state_dict(), "config": config}, os.path.join(out_dir, "ckpt.pt")
    )
destroy_process_group()
