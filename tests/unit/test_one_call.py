"""`save` and `load` of the helper: all of a loop's state in one call each, on real ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import rarely
from test_torch_calls import both
from test_torch_helper import run_ranks, torchrun
from torch import nn

from distributed import checkpoint
from distributed import torch as helper
from distributed.checkpoint.one_call import complete

pytestmark = pytest.mark.slow


class Loop:
    """A loop as a user writes it, which draws random numbers."""

    def __init__(self, strategy: str = "auto", dtype: str | None = None) -> None:
        env = helper.init_distributed()
        helper.seed_everything(0)
        module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
        self.model = helper.setup_distributed_models(module, strategy=strategy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = helper.grad_scaler(dtype, init_scale=64.0)
        helper.seed_everything(0, env.rank)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs = torch.randn(3, 4, device=helper.device()) + random.random()
            loss = self.model(inputs).square().mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def weights(self) -> str:
        state: Any = helper.unwrap(self.model).state_dict()
        whole = {name: getattr(one, "full_tensor", one.detach)() for name, one in state.items()}
        return checkpoint.weights_hash(whole)

    def load(self, folder: str) -> dict[str, Any] | None:
        return helper.load(folder, self.model, self.optimizer, scaler=self.scaler)

    def save(self, folder: str, step: int, **progress: Any) -> None:
        helper.save(folder, step, self.model, self.optimizer, scaler=self.scaler, **progress)


def _save(folder: str, strategy: str, dtype: str | None) -> str:
    """Save after 3 steps; returns the weights after 5."""
    loop = Loop(strategy, dtype)
    assert loop.load(folder) is None
    loop.train(2)
    loop.save(folder, 2)
    loop.train(1)
    loop.save(folder, 3, epoch=1, losses=[0.5, None])
    loop.train(2)
    complete(0)
    return loop.weights()


def _load(folder: str, strategy: str, dtype: str | None) -> tuple[Any, str, float]:
    loop = Loop(strategy, dtype)
    progress = loop.load(folder)
    loop.train(2)
    return progress, loop.weights(), loop.scaler.get_scale()


CHANGES = [("ddp", "ddp"), ("fsdp", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp")]


@pytest.mark.another_torch("FSDP")
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_loop_goes_on_as_if_never_stopped(tmp_path: Path, before: str, after: str) -> None:
    folder, whole = str(tmp_path / "run"), both(_save, str(tmp_path / "run"), before, "float16")
    format = {path.suffix for path in (tmp_path / "run/step-3").iterdir()}
    assert (".distcp" in format) == (before == "fsdp")
    resumed = both(_load, folder, after, "float16")
    assert len({*whole}) == 1 and whole[0].isalnum(), whole
    for found, weights, scale in resumed:
        assert (found, weights, scale) == (
            {"step": 3, "epoch": 1, "losses": [0.5, None]},
            whole[0],
            64.0,
        )


def _fewer(folder: str) -> tuple[Any, ...]:
    found = _load(folder, "auto", None)
    return found[0]["step"], found[2]


@pytest.mark.parametrize("strategy", ["fsdp", *rarely("ddp")])
def test_one_process_goes_on_with_what_two_have_saved(tmp_path: Path, strategy: str) -> None:
    folder = str(tmp_path / "run")
    both(_save, folder, strategy, None)
    assert run_ranks(_fewer, folder, ranks=[0], world_size=1) == [(3, 1.0)]


def test_a_run_saved_without_a_scaler_goes_on_with_float16(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    both(_save, folder, "ddp", "bfloat16")
    for progress, _, scale in both(_load, folder, "ddp", "float16"):
        assert progress["step"] == 3 and scale == 64.0


@pytest.mark.parametrize("strategy", ["ddp", *rarely("fsdp")])
@pytest.mark.parametrize("end", ["finish()", ""])
def test_the_end_of_a_script_waits_for_the_last_save(
    tmp_path: Path, strategy: str, end: str
) -> None:
    torchrun(
        tmp_path,
        f"""
        init_distributed()
        model = setup_distributed_models(nn.Linear(2000, 2000), strategy="{strategy}")
        save("run", 1, model, torch.optim.SGD(model.parameters()))
        {end}
        """,
    )
    assert (tmp_path / "run/latest").resolve().name == "step-1"


def test_progress_that_json_lacks_is_refused_at_once(tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(TypeError, match="Tensor is not JSON serializable"):
        loop.save(str(tmp_path), 1, loss=torch.ones(()))


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    loop = Loop()
    for step, score in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
        loop.save(str(tmp_path / "run"), step, score=score)
    complete(0)
    names = {path.name for path in (tmp_path / "run").iterdir() if path.name.startswith("step")}
    assert names == {"step-2", "step-3", "step-4"}
    assert json.loads((tmp_path / "run/step-4/progress.json").read_text())["step"] == 4
