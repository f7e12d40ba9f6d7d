"""The rows of `make test-nccl`, in order: if the time is up, those that tell most have run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import nccl_failures
import nccl_hosts
import nccl_runs
from rows import Row

FEW, RANKS, MANY = 2, 4, 8
STRATEGIES = ("ddp", "fsdp")


def row(name: str, see: Callable[..., str], **given: object) -> Row:
    """Return a row in which gloo takes NCCL's place on a machine without a GPU."""
    return Row(name, partial(see, **given), needs_gpu=False)


NCCL = [
    *(
        row(
            f"`scripts/test_distributed.sh {ranks}`: collectives with known answers",
            nccl_runs.self_test,
            ranks=ranks,
        )
        for ranks in (FEW, RANKS, MANY)
    ),
    *(
        row(
            f"train.py, {strategy}, {FEW} ranks, run twice",
            nccl_runs.train_twice,
            ranks=FEW,
            strategy=strategy,
        )
        for strategy in STRATEGIES
    ),
    *nccl_failures.ROWS,
    row("train.py stopped by SIGTERM, and resumed", nccl_runs.stop_and_resume, ranks=FEW),
    row("sharded snapshots: a rank is killed", nccl_runs.restart_sharded, ranks=FEW),
    row("DDP, snapshots: a rank is killed", nccl_runs.restart_ddp, ranks=RANKS),
    row("two hosts, 2 x 2 ranks by hand: the interface", nccl_hosts.use_link, how="launch"),
    row("two hosts, 2 x 2 ranks over ssh: the interface", nccl_hosts.use_link, how="hosts"),
    row("two hosts: a wrong NCCL_SOCKET_IFNAME, before the start", nccl_hosts.reject_interface),
    row("two hosts: the link is cut for 5 s", nccl_hosts.heal_link),
    row("two hosts: the link is cut for good", nccl_hosts.lose_link),
    row("`NCCL_DEBUG=INFO`, 8 ranks, `raise` on rank 1: the block is last", nccl_failures.debug),
    row("ten restarts in a row", nccl_runs.restart_often, ranks=RANKS),
    row("the end of 8 ranks with two process groups", nccl_runs.end, ranks=MANY),
    *(
        row(f"launch of {ranks} ranks, to the first step", nccl_runs.start, ranks=ranks)
        for ranks in (FEW, RANKS, MANY)
    ),
    *(
        row(
            f"train.py, {strategy}, {RANKS} ranks",
            nccl_runs.train,
            ranks=RANKS,
            strategy=strategy,
        )
        for strategy in STRATEGIES
    ),
]
