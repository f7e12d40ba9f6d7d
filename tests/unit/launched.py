"""A folder in which train.py trains on one node, and the results of its runs."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from agents import AGENT, ROOT
from torch import Tensor

from distributed.checkpoint import State, load, weights_hash

TRAIN = str(ROOT / "train.py")


def state_of(run_folder: Path) -> State:
    """Return the state that a run saved last."""
    state = load(run_folder)
    assert state is not None
    return state


def hash_of(run_folder: Path) -> str:
    """Return the hash of the weights that a run saved last."""
    return weights_hash(state_of(run_folder).model)


class Work:
    """Trains with one config and the given settings."""

    def __init__(self, folder: Path, config: str, *settings: str) -> None:
        self.folder, self.config, self.settings = folder, config, settings

    def run(self, run_id: str, nproc: int, *settings: str, code: int = 0, **more: str) -> str:
        """Train; returns what was printed."""
        options = [f"--nproc-per-node={nproc}", "--log-dir=logs", f"--rdzv-id={run_id}"]
        # If another test has compiled anything in this process, torch has set INDUCTOR variables.
        kept = {name: one for name, one in os.environ.items() if "INDUCTOR" not in name}
        variables = {"RUN_ID": run_id, "OMP_NUM_THREADS": "1", **more}
        done = subprocess.run(
            [*AGENT, *options, TRAIN, "--config", self.config, *self.settings, *settings],
            cwd=self.folder,
            env={**kept, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def metrics(self, run_id: str, name: str) -> dict[int, Any]:
        lines = (self.folder / "logs" / run_id / "metrics.jsonl").read_text().splitlines()
        return {one["step"]: one[name] for one in map(json.loads, lines) if name in one}

    def weights(self, run_id: str) -> dict[str, Tensor]:
        return state_of(self.folder / "checkpoints" / run_id).model
