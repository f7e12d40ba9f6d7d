"""A LightningModule and its Trainer, which reads the world's size from the launcher's variables.

pip install lightning
scripts/launch.sh --nproc-per-node 2 examples/lightning_fit.py
"""

import os

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    lightning.seed_everything(1, workers=True)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=2,
        log_every_n_steps=1,
        logger=CSVLogger("."),
        enable_progress_bar=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4))
    print(f"rank {trainer.global_rank}: {trainer.callback_metrics['loss']:.6f}")
