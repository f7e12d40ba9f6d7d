"""`make bench-settings`: its rows compute the same loss, and each is in the table."""

import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_settings
import gpu_variants
import pytest
import torch
from agents import PATIENCE_S, ROOT, run_program

from training.settings import LanguageModel
from training.tasks.language_model import GPT, LanguageModelTask

BASE = gpu_settings.BASE


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return GPT(LanguageModel(layers=2, heads=2, width=16, context=8, vocabulary=32))


def loss_and_gradient(model: Any, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (loss, *torch.autograd.grad(loss, model.parameters()))


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("views", [False, True])
def test_other_attention_and_a_split_loss_compute_the_same(
    model: Any, chunks: int, views: bool
) -> None:
    batch = torch.randint(32, (3, 9))
    plain = loss_and_gradient(model, LanguageModelTask.loss(mock.Mock(), model, batch))
    for block in model.blocks.layers if views else ():
        block.self_attn.forward = functools.partial(gpu_variants.attend, block.self_attn)
    loss = gpu_variants.split_loss(model, gpu_variants.sum_of_losses, chunks, batch)
    for ours, theirs in zip(loss_and_gradient(model, loss), plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_batches_that_are_moved_ahead_keep_their_order() -> None:
    batches = [mock.MagicMock() for _ in range(3)]
    fakes = {"Stream": mock.Mock(), "stream": mock.MagicMock(), "current_stream": mock.Mock()}
    with mock.patch.multiple(torch.cuda, **fakes):
        moved = gpu_variants.move_ahead(batches)
        assert next(moved) is batches[0].to.return_value
        batches[1].to.assert_called_once()  # before the first step
        batches[2].to.assert_not_called()
        assert [*moved] == [one.to.return_value for one in batches[1:]]


def test_of_two_rows_for_one_setting_the_faster_is_combined() -> None:
    speeds = {BASE: 100.0, "micro-batch 64": 110.0, "micro-batch 128": 109.0, "TF32": 100.1}
    speeds |= {"loss compiled": 120.0, "one graph, reduce-overhead": 119.0, "AdamW foreach": 90.0}
    speeds |= {"gradients not clipped": 130.0}  # which would change what is trained
    assert gpu_settings.combine(speeds) == {"batch": 64, "compiled": "blocks, loss"}
    assert gpu_settings.combine({"TF32": 5.0}) == {}  # without a base line


def test_every_row_changes_settings_of_a_variant() -> None:
    variants = [gpu_variants.Variant(**changes) for changes in gpu_settings.ROWS.values()]
    assert variants.count(gpu_variants.Variant()) == 1  # train.py's


def bench(file: Path, *words: object, **variables: str) -> str:
    command = [sys.executable, ROOT / "bench/gpu_settings.py", "--pretend", "--json", file, *words]
    variables |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{ROOT}/bench"}
    done = run_program(command, ROOT, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rows_without_time_are_named(tmp_path: Path) -> None:
    told = bench(tmp_path / "rows.jsonl", "--seconds", "1", "TF32", "micro-batch 16")
    for name in (BASE, "TF32", "micro-batch 16"):
        assert f"| {name} | left out: no time |" in told


@pytest.mark.slow
def test_rows_run_on_a_cpu_without_a_compiler(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    words = ["q, k and v", "foreach", "CUDNN"]
    told = bench(file, "--seconds", PATIENCE_S, *words, CXX="no-such-compiler")
    found = {row["row"]: row for row in map(json.loads, file.read_text().splitlines())}
    base = found[BASE]
    assert base["tokens_per_second"] > 0
    for name in ("q, k and v without copies", "AdamW foreach"):
        assert found[name]["loss"] == pytest.approx(base["loss"], rel=1e-4)
        assert f"| {name} | {found[name]['tokens_per_second']:,.0f} |" in told
    assert "| no C++ compiler | needs a GPU |" in told
    assert "| CUDNN_ATTENTION | needs a GPU |" in told
