"""What bench/failures.py starts: ranks that fail, wait or save, each on request.

    FOLDER=FOLDER WHAT=fail|idle|wait|save <launcher> bench/failing_ranks.py

Each rank writes FOLDER/<rank>.pid once all have met. Then, for `fail`, rank 2 exits with code 7
while the others are in an all-reduce; for `idle`, while the others sleep; for `wait`, all ranks
sleep; for `save`, a rank that gets SIGTERM takes SAVE_S seconds, writes FOLDER/<rank>.saved and
exits with code 75.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

FAILING = 2
CODE = 7
SAVE_S = 2.0


def main() -> None:
    folder, what = Path(os.environ["FOLDER"]), os.environ["WHAT"]
    rank = int(os.environ["RANK"])

    def save(*_: object) -> None:
        time.sleep(SAVE_S)
        (folder / f"{rank}.saved").touch()
        os._exit(75)

    if what == "save":
        signal.signal(signal.SIGTERM, save)
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    torch.distributed.barrier()
    if rank == FAILING and what in ("fail", "idle"):
        sys.exit(CODE)
    while what == "fail":
        torch.distributed.all_reduce(torch.ones(1))
    time.sleep(600)


if __name__ == "__main__":
    main()
