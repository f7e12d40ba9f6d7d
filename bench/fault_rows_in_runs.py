"""The other faults of `make bench-faults`: most are caused once the ranks take steps.

See fault_rows.py for the format.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fault_rows import SECRET, Elsewhere, Fault

ENDLESS = 10**9  # steps


def in_run(name: str, made: str, during: str, **changes: Any) -> Fault:
    """Return a fault caused during a run; by default, the run must end with code 137 within 2 s."""
    fault = Fault(name, made, during=during, code=137, limit_s=2.0, steps=ENDLESS)
    return replace(fault, **changes)


IN_RUNS: tuple[Fault | Elsewhere, ...] = (
    in_run("rank-killed", "`kill -9` of rank 2", "signal_rank KILL"),
    in_run(
        "out-of-memory",
        "rank 2 needs 4 GiB, and node3's control group has 1.5",
        "echo grow >fault",
        make="limit_memory $((3 << 29))",
        undo="lift_limit",
        limit_s=15.0,
        is_apart=False,
    ),
    in_run("agent-killed", "`kill -9` of node3's node agent (torchrun)", "kill_agent"),
    in_run("launcher-killed", "`kill -9` of the ssh connection to node3", "kill_connection"),
    in_run(
        "link-lost",
        "node3's cable is unplugged; `SILENCE_SECONDS=10`",
        '"$CLUSTER" cut node3',
        undo="restore node3",
        limit_s=15.0,
        variables={"SILENCE_SECONDS": "10"},
        is_apart=False,
    ),
    in_run(
        "rank-stuck",
        "SIGSTOP to rank 2; `HANG_SECONDS=10`",
        "signal_rank STOP",
        limit_s=35.0,
        variables={"HANG_SECONDS": "10"},
    ),
    in_run(
        "rank-stuck",
        "rank 2 waits for input forever; `HANG_SECONDS=10`",
        "echo wait >fault",
        limit_s=35.0,
        variables={"HANG_SECONDS": "10"},
    ),
    in_run("rank-error", "an exception on rank 2", "echo raise >fault", code=1),
    Fault(
        "stranger",
        "by hand: node4 sends an HTTP request to the port where node1 waits for the others",
        command="KNOCKS=1; hand",
        torchrun="KNOCKS=1; torchrun",
        host=r"10\.0\.0\.4",
        code=0,
        variables={"RUN_SECRET": SECRET},
    ),
    in_run(
        "log-lost",
        "the disk with node3's logs is full",
        "fill_disk node3 logs",
        make="add_disk node3 logs",
        undo='on node3 umount --lazy "$PWD/logs"',
        code=0,
        limit_s=15.0,
        steps=200,
        variables={"LOGS": "--log-dir=logs --tee=3"},
    ),
    in_run(
        "loss-not-finite",
        "rank 2's loss is nan",
        "echo nan >fault",
        command="task",
        code=1,
        limit_s=15.0,
    ),
    in_run(
        "disk-full",
        "node1's disk for checkpoints is full",
        "fill_disk node1 disk",
        make="add_disk node1 disk",
        undo='on node1 umount --lazy "$PWD/disk"',
        command="task checkpoint.dir=disk checkpoint.every=20",
        host="node1",
        code=1,
        limit_s=15.0,
    ),
    in_run(
        "slow-rank",
        "rank 2 takes twice as long to compute",
        "echo slow >fault",
        command="task",
        code=0,
        limit_s=60.0,
        steps=400,
    ),
    Elsewhere("slow-link", "`scripts/test_distributed.sh` measures links, no launch does"),
    Elsewhere("wrong-result", "needs faulty hardware; tests/unit/test_selftest.py breaks a sum"),
    in_run(
        "node-lost",
        "SLURM: the job's only node, a virtual machine, is suspended, and resumed later",
        '"$CLUSTER" cut node3; on node3 bash -c "kill -STOP -1"',
        undo="on node3 bash -c 'kill -CONT -1'; restore node3",
        command="lose_job",
        torchrun="",
        host=r"on node\d",
        code=0,
        limit_s=120.0,
    ),
    Fault(
        "foreign-run",
        "SLURM: a new cluster's first job has the id of an old one's",
        make='"$CLUSTER" up 4 >/dev/null; slurm >first 2>&1; "$CLUSTER" up 4 >/dev/null',
        command="slurm",
        torchrun="",
        host="another job with the same id",
    ),
)
