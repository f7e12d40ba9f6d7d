"""What each launcher starts: one optimizer step of a small DDP model, then the time of its end.

    FIRST_STEP=FOLDER <launcher> bench/first_step.py

Each rank writes FOLDER/<rank>: seconds since the epoch when its first step was done.
"""

import os
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    Path(os.environ["FIRST_STEP"], os.environ["RANK"]).write_text(repr(time.time()))
    torch.distributed.barrier()
    os._exit(0)  # taking a gloo group down can deadlock: github.com/pytorch/pytorch/issues/56297


if __name__ == "__main__":
    main()
