"""Plain DDP with a snapshot, modelled on PyTorch's tutorial `multigpu_torchrun.py`.

If asked to, it crashes once in its second epoch; when restarted, it continues from the snapshot.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model: torch.nn.Module, snapshot: str) -> None:
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.snapshot = snapshot
        self.epoch = 0
        if os.path.exists(snapshot):
            saved = torch.load(snapshot)
            self.model.module.load_state_dict(saved["model"])
            self.epoch = saved["epoch"]
            print(f"rank {dist.get_rank()} goes on at epoch {self.epoch}")

    def train(self, data: DataLoader, epochs: int, crash: bool) -> None:
        for epoch in range(self.epoch, epochs):
            data.sampler.set_epoch(epoch)
            for inputs, targets in data:
                self.optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
                loss.backward()
                self.optimizer.step()
            print(f"[rank {dist.get_rank()}] epoch {epoch} | {len(data)} steps | loss {loss:.6f}")
            if dist.get_rank() == 0:
                torch.save(
                    {"model": self.model.module.state_dict(), "epoch": epoch + 1}, self.snapshot
                )
            dist.barrier()
            if crash and epoch == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise RuntimeError(f"rank {dist.get_rank()} crashes")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--crash", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    Trainer(torch.nn.Linear(8, 1), "snapshot.pt").train(loader, arguments.epochs, arguments.crash)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
