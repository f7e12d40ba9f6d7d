"""A small job that can be stopped, killed, hung and resumed, and the results that it leaves."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agents import (
    AGENT,
    PATIENCE_S,
    ROOT,
    Run,
    children,
    eventually,
    kill_what_is_left,
    world,
    written,
)
from launched import state_of
from ports import free_port

from distributed.checkpoint import weights_hash
from distributed.checkpoint.memory import Memory

# Its samples, its dropout and its batches are all drawn at random. FAULT="WHAT RANK CALL" causes a
# fault in a rank at that call of the loss, only in the first attempt or, with "always-WHAT", in
# every attempt.
TASK = """
import os, random, signal, time
import numpy, torch
from torch import nn
from torch.utils.data import Dataset
from training.tasks import Task

class Noisy(Dataset):
    def __len__(self):
        return 88
    def __getitem__(self, index):
        x = torch.linspace(-1, 1, 4) * index / 88
        noise = torch.rand(4) + random.random() + numpy.random.rand()
        return (x + 0.01 * noise).float(), x.sum()

class Noisily(Task):
    def __init__(self, settings):
        self.train = self.validation = Noisy()
        self.calls = 0
        what, rank, call = os.environ.get("FAULT", "none -1 0").split()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        is_here = rank == os.environ.get("RANK", "0") and (attempt == "0" or "always" in what)
        self.fault, self.call = (what.removeprefix("always-"), int(call)) if is_here else ("", 0)
    def model(self):
        return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    def loss(self, model, batch):
        self.calls += model.training
        time.sleep(float(os.environ.get("PACE", 0)))
        if model.training and "SEEN" in os.environ:
            with open(os.environ["SEEN"], "a") as file:
                file.write("".join(f"{sample:.9f}\\n" for sample in batch[1].tolist()))
        loss = (model(batch[0])[:, 0] - batch[1]).square().mean()
        if self.calls != self.call:
            return loss
        if self.fault == "nan":
            return loss * float("nan")
        if self.fault == "nan-gradient":
            loss.register_hook(lambda gradient: gradient * float("nan"))
            return loss
        if self.fault == "leave":
            os._exit(0)
        if self.fault == "sleep":
            time.sleep(1000)
        elif self.fault:
            os.kill(os.getpid(), getattr(signal, self.fault))
        return loss
"""
CONFIG = """
task: noisy:Noisily
model: {}
train: {max_steps: 60, global_batch_size: 16, grad_accumulation: 2, learning_rate: 0.01,
        log_every: 7, eval_every: 20}
checkpoint: {every: 5, keep_last: 2}
"""
# train.py, but rank R kills all ranks with SIGKILL when it reaches fault point N of saving, or the
# fault point named N; "N R" is the first line of the file KILLS. If no line is left, train.py runs
# to its end.
DEADLY = """
import os, runpy, signal, sys
sys.path.insert(0, os.environ["ROOT"])
import torch
from pathlib import Path
from distributed import checkpoint
from distributed.checkpoint import files, saver

kills = Path(os.environ["KILLS"])
lines = kills.read_text().splitlines()
wanted, killer = lines[0].split() if lines else (10**9, "nobody")
left = 10**9 if "." in str(wanted) else int(wanted)

def deadly(owner, name):
    call, point = getattr(owner, name), f"{owner.__name__.rpartition('.')[2]}.{name}"
    def wrapped(*args, **options):
        global left
        left -= 1
        if left == 0 or point == wanted:
            with open(os.environ["KILLED"], "a") as file:
                print(point, file=file)
            kills.write_text("\\n".join(lines[1:]))
            agent = os.getppid()
            ranks = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
            for pid in [pid for pid in map(int, ranks) if pid != os.getpid()] + [os.getpid()]:
                os.kill(pid, signal.SIGKILL)
        return call(*args, **options)
    setattr(owner, name, wrapped)

if os.environ["RANK"] == killer:
    for name in ("mkdir", "fsync", "rename", "symlink", "replace", "unlink", "rmdir"):
        deadly(os, name)
    for name in ("hash_file", "write_files", "commit", "prune"):
        deadly(files, name)
        setattr(saver, name, getattr(files, name))  # imported by name
    for name in ("save", "_write"):
        deadly(checkpoint.Saver, name)
    deadly(torch, "save")
    if "checkpoint.format=sharded" in sys.argv:
        from distributed.checkpoint import sharded
        for name in ("plan_and_choose", "write", "_write"):
            deadly(sharded.Parts, name)
        for name in ("write_data", "finish"):
            deadly(sharded.FileSystemWriter, name)
sys.argv[0] = os.environ["ROOT"] + "/train.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FAULT_POINTS = {
    *("os.mkdir", "os.fsync", "os.rename", "os.symlink", "os.replace", "os.unlink", "os.rmdir"),
    *(f"files.{name}" for name in ("hash_file", "write_files", "commit", "prune")),
    *("Saver.save", "Saver._write", "torch.save"),
}
SHARDED = ("distributed.strategy=fsdp", "checkpoint.format=sharded")
PART_POINTS = {  # in each rank's part of a sharded checkpoint
    *("Saver.save", "Saver._write", "Parts.plan_and_choose", "Parts.write", "Parts._write"),
    *("FileSystemWriter.write_data", "torch.save", "files.hash_file", "os.fsync"),
}
REACH = {"full": (40,), "sharded": (100, 25)}  # fault points that each rank reaches in 1 or 2 saves


STOPS = ("SIGTERM", "SIGUSR1", "SIGINT")


def draw_kills(draw: random.Random, times: int, format: str) -> list[str]:
    """Return kills of random ranks at random points of saving, in kill_and_finish's format."""
    reach = REACH[format]
    ranks = [draw.randrange(len(reach)) for _ in range(times)]
    return [f"{draw.randrange(1, reach[rank])} {rank}" for rank in ranks]


def ranks_below(supervisor: int) -> list[int]:
    """Return the process ids of the ranks; none before they are forked."""
    return [rank for agent in children(supervisor) for rank in children(agent)]


def snapshots_on(run: Run) -> list[int]:
    """Return the steps of all snapshots in an agent's memory."""
    found = []
    with contextlib.suppress(OSError, IndexError):  # it has only just started
        for link in Path(f"/proc/{run.agent_pid()}/fd").iterdir():
            if "memfd:snapshot" in os.readlink(link):
                fd = os.open(link, os.O_RDONLY)
                found.append(Memory(fd).header().step)
                os.close(fd)
    return found


def await_snapshots(run: Run, step: int, parts: int = 1) -> None:
    """Wait until an agent holds this many parts of snapshots of a step or of later steps."""

    def is_so() -> bool:
        assert run.process.poll() is None
        return sum(one >= step for one in snapshots_on(run)) >= parts

    eventually(is_so)


def steps_lost(output: str) -> list[int]:
    """Return how many steps each restart cost, as reported by the node agent."""
    return [int(lost) for lost in re.findall(r"restart \d+ of .*, (\d+) steps? lost; now", output)]


@dataclass(frozen=True)
class Outcome:
    """The hash of a run's weights, and the step and both losses of each line of its metrics."""

    weights: str
    metrics: list[tuple[int, float | None, float | None]]


class Job:
    """One config in one folder, started with any run id and any number of ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "noisy.py").write_text(TASK)
        (folder / "job.yaml").write_text(CONFIG)
        (folder / "deadly.py").write_text(DEADLY)

    def start(
        self,
        run_id: str,
        nproc: int,
        *settings: str,
        script: Path = ROOT / "train.py",
        restarts: int = 0,
        **environment: str,
    ) -> subprocess.Popen[str]:
        options = ["--nproc-per-node", str(nproc), "--max-restarts", str(restarts)]
        return subprocess.Popen(
            [*AGENT, *options, "--log-dir", "logs", script, "--config", "job.yaml", *settings],
            cwd=self.folder,
            env={**os.environ, "RUN_ID": run_id, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @contextlib.contextmanager
    def nodes(
        self, run_id: str, nodes: int, *settings: str, spares: int = 0, **environment: str
    ) -> Iterator[list[Run]]:
        """Start a run of several nodes on loopback, each with one rank."""
        port, runs = free_port(), list[Run]()
        variables = {"OMP_NUM_THREADS": "1", **environment}
        if spares:
            variables |= {"SPARES": str(spares), "MIN_NODES": str(nodes)}
        job = [f"--max-restarts={spares}", f"--rdzv-id={run_id}", "--log-dir=logs"]
        command = [str(ROOT / "train.py"), "--config", "job.yaml", *settings]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            for node in range(nodes + spares):
                variables["LAUNCH_TOKEN"] = f"{run_id}.{node}"
                words = [*world(port, node, nodes=nodes), *job, *command]
                runs.append(Run(words, **variables))
        try:
            yield runs
        finally:
            kill_what_is_left(runs)

    def run(self, run_id: str, nproc: int, *settings: str, **options: Any) -> tuple[int, str]:
        """Run to the end; returns the exit code and all output."""
        process = self.start(run_id, nproc, *settings, **options)
        output = process.communicate(timeout=PATIENCE_S)[0]
        return process.returncode, output

    def finish(self, run_id: str, nproc: int, *settings: str) -> Outcome:
        code, output = self.run(run_id, nproc, *settings)
        assert code == 0, output
        return self.outcome(run_id)

    def stop_and_finish(
        self, run_id: str, nproc: int, settings: Sequence[str], faults: Sequence[str]
    ) -> Outcome:
        """Start the run once for each fault, which must make it save and stop; then finish it."""
        for fault in faults:
            code, output = self.run(run_id, nproc, *settings, FAULT=fault)
            assert code == 75, output
        return self.finish(run_id, nproc, *settings)

    def kill_and_finish(
        self, run_id: str, nproc: int, settings: Sequence[str], kills: Sequence[str]
    ) -> Outcome:
        """Kill all ranks at fault points of saving: "N R" is rank R's N-th, or the one named N."""
        counts = written(self.folder / f"{run_id}.kills", "\n".join(kills))
        files = {"KILLS": str(counts), "KILLED": str(self.folder / "killed"), "ROOT": str(ROOT)}
        code = 1
        while code != 0:
            how: dict[str, Any] = {"script": self.folder / "deadly.py", "restarts": len(kills)}
            code, output = self.run(run_id, nproc, *settings, **how, **files)
            assert code in (0, 137), output
        assert counts.read_text() == "", output
        return self.outcome(run_id)

    def kill_at_random(
        self, run_id: str, nproc: int, settings: Sequence[str], kills: int, draw: random.Random
    ) -> str:
        """Kill -9 a random rank at random moments of a run; returns all its output."""
        process = self.start(run_id, nproc, *settings, restarts=kills, PACE="0.01")
        while kills and process.poll() is None:
            time.sleep(draw.uniform(0, 2))
            if ranks := ranks_below(process.pid):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(draw.choice(ranks), signal.SIGKILL)
                    kills -= 1
        output = process.communicate(timeout=PATIENCE_S)[0]
        assert process.returncode == 0, output
        return output

    def outcome(self, run_id: str) -> Outcome:
        state = state_of(self.folder / "checkpoints" / run_id)
        lines = (self.folder / "logs" / run_id / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        return Outcome(
            weights_hash(state.model),
            [(line["step"], line.get("loss"), line.get("validation_loss")) for line in metrics],
        )
