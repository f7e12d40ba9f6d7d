"""The rows of `make test-nccl`, in order: if the time is up, those that tell most have run."""

from __future__ import annotations

from functools import partial

import nccl_failures
import nccl_runs
from rows import Row

FEW, RANKS, MANY = 2, 4, 8
# Without a GPU, gloo takes NCCL's place. A row that needs a GPU even so says so.
NCCL = [
    *(
        Row(
            f"`scripts/test_distributed.sh {ranks}`: collectives with known answers",
            partial(nccl_runs.self_test, ranks=ranks),
            needs_gpu=False,
        )
        for ranks in (FEW, RANKS, MANY)
    ),
    *(
        Row(
            f"train.py, {strategy}, {FEW} ranks, run twice",
            partial(nccl_runs.train_twice, ranks=FEW, strategy=strategy),
            needs_gpu=False,
        )
        for strategy in ("ddp", "fsdp")
    ),
    *nccl_failures.ROWS,
    *(
        Row(name, partial(see, ranks=ranks), needs_gpu=False)
        for name, see, ranks in (
            ("train.py stopped by SIGTERM, and resumed", nccl_runs.stop_and_resume, FEW),
            ("sharded snapshots: a rank is killed", nccl_runs.restart_sharded, FEW),
            ("DDP, snapshots: a rank is killed", nccl_runs.restart_ddp, RANKS),
        )
    ),
    Row("two hosts, 2 x 2 ranks by hand: the interface", nccl_runs.use_link, needs_gpu=False),
    Row(
        "two hosts: a wrong NCCL_SOCKET_IFNAME, before the start",
        nccl_runs.reject_interface,
        needs_gpu=False,
    ),
    Row(
        "`NCCL_DEBUG=INFO`, 8 ranks, `raise` on rank 1: the block is last",
        nccl_failures.debug,
        needs_gpu=False,
    ),
    *(
        Row(name, partial(see, ranks=ranks), needs_gpu=False)
        for name, see, ranks in (
            ("ten restarts in a row", nccl_runs.restart_often, RANKS),
            ("the end of 8 ranks with two process groups", nccl_runs.end, MANY),
            *(
                (f"launch of {ranks} ranks, to the first step", nccl_runs.start, ranks)
                for ranks in (FEW, RANKS, MANY)
            ),
        )
    ),
    *(
        Row(
            f"train.py, {strategy}, {RANKS} ranks",
            partial(nccl_runs.train, ranks=RANKS, strategy=strategy),
            needs_gpu=False,
        )
        for strategy in ("ddp", "fsdp")
    ),
]
