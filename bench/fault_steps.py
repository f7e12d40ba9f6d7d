"""The script of `make bench-faults` and `make bench-failures`: plain torch; rank 2 may fail.

    <launcher> bench/fault_steps.py FOLDER STEPS

Each rank writes its process id to FOLDER/rank_<rank> once all have met. Once FOLDER/fault exists,
rank 2 does what the file says: raise, leave, wait, grow, nan or slow. If there is a folder
FOLDER/disk, rank 0 saves to it. If there is a file FOLDER/idle, the ranks take no steps. If there
is a file FOLDER/saves, a rank that gets SIGTERM waits SAVE_S seconds, writes FOLDER/<rank>.saved
and exits with 75.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FAULTY = 2
GROW_BYTES = 4 << 30
CODE = 7  # of `leave`
SAVE_S = 2.0


def main(folder: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def save(*_: object) -> None:
        time.sleep(SAVE_S)
        (folder / f"{rank}.saved").touch()
        os._exit(75)

    if (folder / "saves").exists():
        signal.signal(signal.SIGTERM, save)
    (folder / f"rank_{rank}").write_text(str(os.getpid()))
    while (folder / "idle").exists():
        if rank == FAULTY:
            read_batch(folder / "fault")
        time.sleep(0.01)
    for step in range(steps):
        batch = read_batch(folder / "fault") if rank == FAULTY else torch.ones(4, 8)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}", model.module.bias.tolist(), flush=True)
        if rank == 0 and (folder / "disk").is_dir():
            torch.save(model.state_dict(), folder / f"disk/{step}.pt")
        time.sleep(0.05)
    dist.destroy_process_group()


def read_batch(fault: Path) -> torch.Tensor:
    what = fault.read_text().strip() if fault.exists() else ""
    if what == "raise":
        raise ValueError("batch 120 holds no samples")
    if what == "leave":
        sys.exit(CODE)
    if what == "wait":
        time.sleep(1000)
    if what == "slow":
        time.sleep(0.2)
    if what == "grow":
        return torch.ones(len(b"1" * GROW_BYTES))
    return torch.full((4, 8), float("nan") if what == "nan" else 1.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
