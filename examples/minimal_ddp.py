"""A minimal DDP script in plain torch, with nothing from this project.

    TRAIN_SCRIPT=examples/minimal_ddp.py scripts/ssh/launch_singlenode.sh - 2

torchrun can also start it: torchrun --nproc-per-node 2 examples/minimal_ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")

torch.manual_seed(0)  # the same data on every rank; each trains on its own share
inputs = torch.randn(4096, 8)  # [sample, feature]
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
for epoch in range(3):
    sampler.set_epoch(epoch)  # a new order in each epoch
    for features, target in loader:
        loss = mse_loss(model(features.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.all_reduce(total := loss.detach().clone())
    if dist.get_rank() == 0:
        print(f"epoch {epoch}  loss {total.item() / dist.get_world_size():.6f}")

del model  # before the process group: gloo may hang otherwise
dist.destroy_process_group()
