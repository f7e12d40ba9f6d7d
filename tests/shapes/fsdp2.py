"""FSDP2, modelled on PyTorch's example: shards each layer, saves with DCP, and loads again."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = get_model_state_dict(model)
    dcp.save({"model": state}, checkpoint_id="dcp")
    dcp.load({"model": state}, checkpoint_id="dcp")
    print(
        f"rank {dist.get_rank()}: loss {loss:.6f}, shard {tuple(model[0].weight.to_local().shape)}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
