"""Rank 1 raises within torch's @record, as the torchrun documentation recommends; rank 0 waits."""

import sys

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()} is ready", flush=True)
    dist.barrier()
    if dist.get_rank() == 1:
        if len(sys.argv) > 1:
            sys.exit(int(sys.argv[1]))
        raise ValueError("batch 7 holds no samples")
    dist.barrier()


if __name__ == "__main__":
    main()
