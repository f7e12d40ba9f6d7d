"""Modelled on PyTorch's minGPT example: Hydra reads the config and names the run's folder."""

import logging
import os

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

log = logging.getLogger(__name__)


@hydra.main(version_base=None, config_path="hydra_config", config_name="config")
def main(config: DictConfig) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(config.train.get("seed", 1))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(config.model.width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.train.lr)
    for _ in range(config.train.steps):
        loss = model(torch.ones(4, config.model.width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if os.environ["RANK"] == "0":
        log.info("finished")
        print(OmegaConf.to_yaml(config), f"loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
