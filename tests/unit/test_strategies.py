"""fsdp, ddp and single train the same model, and a run moves from one to the other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from agents import ROOT, rarely, run_agent
from launched import Work

STEPS = 50
WORDS = [
    *("model.layers=2", "model.width=32", "model.heads=2", "model.context=16"),
    *("train.global_batch_size=8", "train.warmup_steps=2", "train.eval_every=25"),
    *("train.log_every=1", f"train.max_steps={STEPS}", "checkpoint.every=0"),
]
REFERENCE = f"single-{os.getpid()}"  # workers of pytest may begin at once: a port for each
FSDP = pytest.mark.another_torch("FSDP")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    text = tmp_path_factory.mktemp("text")
    for n in range(40):
        (text / f"{n}.txt").write_text(f"the text of file number {n}\n" * 10)
    folder = tmp_path_factory.mktemp("strategies")
    work = Work(folder, str(ROOT / "config/local3.yaml"), f"data.path={text}", *WORDS)
    work.run(REFERENCE, 1)
    return work


def assert_same(work: Work, run_id: str) -> None:
    mine, theirs = (work.metrics(one, "loss") for one in (run_id, REFERENCE))
    assert mine.keys() == theirs.keys() and len(mine) == STEPS
    assert [*mine.values()] == pytest.approx([*theirs.values()], rel=2e-5)
    weights = work.weights(REFERENCE)
    for name, tensor in work.weights(run_id).items():
        assert tensor.shape == weights[name].shape
        assert torch.allclose(tensor, weights[name], atol=2e-4), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("nproc", "settings"),
    [
        (2, "strategy=ddp"),
        (2, "strategy=ddp static_graph=true bucket_cap_mb=0.01"),
        (2, "strategy=fsdp"),
        (4, "strategy=fsdp"),
        (2, "strategy=fsdp fsdp.reshard_after_forward=false"),
        (2, "strategy=fsdp fsdp.shard=node train.grad_accumulation=2"),
        pytest.param(4, "strategy=fsdp fsdp.shard=2 train.grad_accumulation=2", marks=FSDP),
        (2, "strategy=fsdp train.activation_checkpointing=full"),
        (2, "strategy=ddp train.activation_checkpointing=2"),
        (2, "strategy=ddp train.compile=true"),
        (2, "strategy=fsdp train.compile=true train.activation_checkpointing=full"),
    ],
)
def test_losses_and_weights_are_those_of_one_process(work: Work, nproc: int, settings: str) -> None:
    words = [word if "train." in word else f"distributed.{word}" for word in settings.split()]
    run_id = settings.replace(" ", "-").replace("=", "_") + str(nproc)
    work.run(run_id, nproc, *words)
    assert_same(work, run_id)
    if "compile" in settings:
        assert list((work.folder / "checkpoints" / run_id / "compiled").iterdir())


STOPPING = """
import os, signal
from training.settings import LanguageModel
from training.tasks.language_model import LanguageModelTask

class Stopping(LanguageModelTask):
    calls = 0

    def __init__(self, settings):
        shape = LanguageModel(**settings.model)
        super().__init__(settings.model_copy(update={"model": shape}))

    def loss(self, model, batch):
        self.calls += model.training
        if self.calls == 12:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().loss(model, batch)
"""


# Ranks, strategy, last step.
MOVES = ((4, "fsdp", 12), (2, "ddp", 24), (1, "single", 36), (2, "fsdp", STEPS))


@pytest.mark.parametrize(
    ("written", "moves"),
    [
        pytest.param("sharded", [(2, "fsdp", 12), (1, "fsdp", STEPS)], marks=FSDP),
        *rarely(("sharded", MOVES), ("full", MOVES)),
    ],
)
def test_a_run_moves_between_strategies(
    work: Work, written: str, moves: Sequence[tuple[int, str, int]]
) -> None:
    (work.folder / "stopping.py").write_text(STOPPING)
    chosen = f"checkpoint.format={written}"
    run_id = f"{written}-{len(moves)}"
    for nproc, strategy, last in moves[:-1]:
        words = (f"distributed.strategy={strategy}", "task=stopping:Stopping", chosen)
        told = work.run(run_id, nproc, *words, code=75)
        assert f"stopped    after step {last}," in told
        parts = [*(work.folder / f"checkpoints/{run_id}/step-{last}").glob("*.distcp")]
        assert len(parts) == (nproc if written == "sharded" else 0)
    nproc, strategy, _ = moves[-1]
    work.run(run_id, nproc, f"distributed.strategy={strategy}", chosen)
    assert_same(work, run_id)


@pytest.mark.parametrize("strategy", ["ddp", *rarely("fsdp")])
def test_between_two_log_lines_no_step_waits_for_the_device(tmp_path: Path, strategy: str) -> None:
    """Of a run in which each step is watched."""
    words = ["--config", ROOT / "config/local3.yaml", *WORDS, f"distributed.strategy={strategy}"]
    words += ["train.log_every=3", "train.max_steps=8", "train.grad_accumulation=2"]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = ["--nproc-per-node=2", "--log-dir=logs", ROOT / "bench/waits.py"]
    done = run_agent(*options, *words, folder=tmp_path, **own)
    assert done.returncode == 0 and "waits      none" in done.stdout + done.stderr, done
