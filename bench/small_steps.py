"""The script of launch.py and restart.py: small DDP steps, each recorded when it is done.

    STEPS_FILE=FILE STEPS="2000 5" <launcher> bench/small_steps.py

STEPS is the number of steps in each attempt. A record is one line: the rank, the attempt, the
process id, and seconds since the epoch.
"""

import os
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

PAUSE_S = 0.01


def main() -> None:
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    who = f"{os.environ['RANK']} {attempt} {os.getpid()}"
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Path(os.environ["STEPS_FILE"]).open("a", buffering=1) as steps:  # one write per line
        for _ in range(int(os.environ["STEPS"].split()[attempt])):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            steps.write(f"{who} {time.time()!r}\n")
            time.sleep(PAUSE_S)
    torch.distributed.barrier()
    os._exit(0)  # destroying a gloo group can hang: github.com/pytorch/pytorch/issues/56297


if __name__ == "__main__":
    main()
