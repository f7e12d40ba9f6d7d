"""Run programs on a GPU, each with a time limit.

For `make test-gpu`, `make test-nccl` and `make bench-gpu`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from distributed.collectives import to_bytes

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = str(ROOT / "scripts/launch.sh")
TRAIN = str(ROOT / "scripts/ssh/launch_singlenode.sh")
SELF_TEST = str(ROOT / "scripts/test_distributed.sh")
SMALL_CONFIG = str(ROOT / "config/local3.yaml")
GPT2_CONFIG = str(ROOT / "config/gpt2_124m.yaml")
HAS_GPU = torch.cuda.is_available()
PATIENCE = 1 if HAS_GPU else 10  # CPUs that ranks share with other programs may be that slow
COMMAND_S = 100.0 * PATIENCE  # for one command: if it hangs, the others still have time
STOP_S = 60.0  # for a launcher to end its ranks
TOKENS = 20_000_000
# For GPT-2 or, without a GPU, for a tiny model, so that any machine can run the programs.
GPT2_SETTINGS = ["train.grad_accumulation=1", "train.global_batch_size=32"]
if not HAS_GPU:
    GPT2_SETTINGS[1:] = ["train.global_batch_size=4", "train.compile=false", "model.layers=2"]
    GPT2_SETTINGS += ["model.heads=2", "model.width=64", "model.context=32"]
    GPT2_SETTINGS += ["data.num_workers=1", "data.pin_memory=false"]


def share_gpus(ranks: int) -> dict[str, str]:
    """Return the variables with which so many ranks share the GPUs; without a GPU, those of gloo.

    Our launchers understand a list that names a GPU several times; torchrun does not.
    """
    if not HAS_GPU:
        return {"BACKEND": "gloo"}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [*map(str, range(torch.cuda.device_count()))]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[rank % len(gpus)] for rank in range(ranks))}


class Failed(Exception):
    """A row did not show what it must show."""


class CannotRun(Exception):
    """A row needs something that this machine lacks."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    text: str  # both streams
    seconds: float

    def block(self) -> dict[str, str]:
        """Return the rows of the failure block, by label."""
        rows = re.findall(r"^(FAILED|cause|code|others|log|see) +(.*)", self.text, re.MULTILINE)
        return dict(rows)

    @property
    def fault(self) -> str:
        """The fault named by the block or by a refusal; empty if there is none."""
        named = re.findall(r"\[([a-z-]+)\]$", self.text, re.MULTILINE)
        return named[-1] if named else ""

    def last(self) -> str:
        lines = [line for line in self.text.splitlines() if line.strip()]
        return next((line for line in lines if line.startswith("cause")), (lines or [""])[-1])

    def expect(self, code: int = 0, fault: str = "") -> Ended:
        """Return self. Raises Failed if the command ended with another code or fault."""
        if self.code != code or (fault and self.fault != fault):
            what = f"code {code}{f' [{fault}]' if fault else ''}"
            raise Failed(f"code {self.code} [{self.fault}] in place of {what}: {self.last()}")
        return self


class Machine:
    """Runs commands in its own folder until the time is up; keeps their output."""

    def __init__(self, folder: Path, seconds: float, command_s: float = COMMAND_S) -> None:
        self.folder = folder
        self.blocks = folder / "blocks"  # what users see of each failure
        self.began = time.monotonic()
        self._command_s = command_s
        self._ends = self.began + seconds
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environ = {
            **os.environ,
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(path),
            "LOG_DIR": str(folder / "logs"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        }
        if not HAS_GPU:  # more threads would wait for each other on busy CPUs
            self.environ["OMP_NUM_THREADS"] = "1"

    def left(self) -> float:
        """Return the seconds that the next command may take."""
        return min(self._command_s, self._ends - time.monotonic())

    def run(self, command: Sequence[str], **variables: str) -> Ended:
        """Run a command to its end. Raises Failed when its time is up."""
        began = time.monotonic()
        process = self.start(command, **variables)
        try:
            text, _ = process.communicate(timeout=max(1.0, self.left()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # the launcher also ends its ranks
            raise Failed(f"no end within its time: {_last_words(process)[-200:]}") from None
        ended = Ended(process.returncode, text, time.monotonic() - began)
        with (self.folder / "output.txt").open("a") as file:
            file.write(f"\n$ {' '.join(command)}\n{text}[code {ended.code}]\n")
        return ended

    def start(
        self, command: Sequence[str], out: int | IO[str] = subprocess.PIPE, /, **variables: str
    ) -> subprocess.Popen[str]:
        environ, err = self.environ | variables, subprocess.STDOUT
        return subprocess.Popen(
            command, env=environ, cwd=self.folder, stdout=out, stderr=err, text=True
        )

    def train(
        self,
        run_id: str,
        *settings: str,
        config: str = SMALL_CONFIG,
        ranks: int = 1,
        **variables: str,
    ) -> list[dict[str, float]]:
        """Train under the launcher; returns the lines of metrics.jsonl. Raises Failed."""
        words = [f"checkpoint.dir={self.folder / 'checkpoints'}", "tracking=[]", *settings]
        variables = {"RUN_ID": run_id, **variables}
        self.run([TRAIN, config, str(ranks), *words], **variables).expect()
        return self.metrics(run_id)

    def loop(self, name: str, steps: int, from_step: int) -> dict[str, float]:
        """Return what gpu_loops.py measures of a loop that trains GPT-2. Raises Failed."""
        script = str(ROOT / "bench/gpu_loops.py")
        words = [name, str(steps), str(from_step), GPT2_CONFIG, *self.gpt2_settings()]
        ended = self.run([sys.executable, script, *words]).expect()
        lines = [line for line in ended.text.splitlines() if line.startswith("{")]  # among warnings
        found: dict[str, float] = json.loads(lines[-1])
        return found

    def gpt2_settings(self) -> list[str]:
        """Write random tokens for training and validation; returns the settings for GPT-2."""
        for name, count in (("train.bin", TOKENS), ("val.bin", TOKENS // 16)):
            if not (self.folder / name).exists():
                tokens = torch.randint(50257, (count,), dtype=torch.int32).to(torch.uint16)
                (self.folder / name).write_bytes(to_bytes(tokens))
        return [f"data.path={self.folder}", *GPT2_SETTINGS]

    def metrics(self, run_id: str) -> list[dict[str, float]]:
        """Return the lines with a loss that a run has recorded so far."""
        file = self.folder / "logs" / run_id / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [told for line in lines if "loss" in (told := json.loads(line))]


def _last_words(process: subprocess.Popen[str]) -> str:
    """Return what a process prints until it ends; kill it if it does not."""
    try:
        return process.communicate(timeout=STOP_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"SIGINT did not end it in {STOP_S:.0f} s"
