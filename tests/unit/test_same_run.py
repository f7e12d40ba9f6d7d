"""One config, seed and world size give the same final weights, whichever entry point started it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from agents import AGENT, PATIENCE_S, ROOT, rarely
from launched import state_of
from ports import free_port

from distributed.checkpoint import weights_hash

pytestmark = pytest.mark.slow

CONFIG = str(ROOT / "config/local3.yaml")
SHORT = ["train.max_steps=6", "train.eval_every=0", "checkpoint.every=3", "model.dropout=0.1"]
SHORT += ["model.layers=1", "model.context=32", "tracking=[]", f"data.path={ROOT}/distributed"]
LAUNCHERS = [
    "launch_torchrun_multinode.sh",
    pytest.param("torchrun", marks=[pytest.mark.another_torch("torchrun"), pytest.mark.long]),
    pytest.param(
        "torch.distributed.launch",
        marks=[pytest.mark.another_torch("torch.distributed.launch"), pytest.mark.long],
    ),
    *rarely("launch_singlenode.sh", "run_ddp.sh", "cluster_train.sh"),
]


def commands(launcher: str) -> list[list[str]]:
    """The command of each node."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    by_launch = ["env", f"ENGINE={launcher}", *AGENT]
    port = str(free_port())
    train = ["--nproc-per-node=2", f"--master-port={port}", f"{ROOT}/train.py", "--config", CONFIG]
    by_hand = [f"{ROOT}/scripts/ssh/launch_torchrun_multinode.sh", CONFIG, "1", "2"]
    return {
        "launch_singlenode.sh": [[f"{ROOT}/scripts/ssh/launch_singlenode.sh", CONFIG, "2"]],
        "run_ddp.sh": [[f"{ROOT}/scripts/run_ddp.sh", "-n", "2", "-c", CONFIG]],
        "cluster_train.sh": [[f"{ROOT}/scripts/cluster_train.sh", CONFIG]],
        "launch_torchrun_multinode.sh": [[*by_hand, rank, "127.0.0.1", port] for rank in "01"],
        "the agent": [[*AGENT, *train, "distributed.backend=gloo"]],
        "torchrun": [[*torchrun, *train]],
        "torch.distributed.launch": [[*by_launch, *train]],
    }[launcher]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    return weights_of("the agent", tmp_path_factory.mktemp("reference"))


def weights_of(launcher: str, folder: Path) -> str:
    """Train a few steps and return the hash of the final weights."""
    run_id = f"same-{os.getpid()}"  # it gives the port, and another worker may run one, too
    environment = {**os.environ, "PYTHON": sys.executable, "RUN_ID": run_id, "BACKEND": "gloo"}
    environment |= {"LOG_DIR": f"{folder}/logs", "NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"}
    settings = [*SHORT, f"checkpoint.dir={folder}/checkpoints"]
    nodes = [
        subprocess.Popen([*command, *settings], env=environment, stderr=subprocess.PIPE, text=True)
        for command in commands(launcher)
    ]
    for node in nodes:
        _, err = node.communicate(timeout=PATIENCE_S)
        assert node.returncode == 0, err
    return weights_hash(state_of(folder / "checkpoints" / run_id).model)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_weights_from_every_launcher(
    launcher: str, reference: str, tmp_path: Path
) -> None:
    assert weights_of(launcher, tmp_path) == reference
