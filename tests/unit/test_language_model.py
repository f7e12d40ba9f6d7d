"""The built-in task: its text, its split, its model and its yardsticks."""

from __future__ import annotations

import json
import math
import zlib
from array import array
from pathlib import Path

import pytest
import torch
from torch import Tensor

from training.config_file import SettingsError
from training.settings import LanguageModel, load
from training.tasks.language_model import (
    GPT,
    LanguageModelTask,
    entropy,
    generate,
    printable,
    zlib_rate,
)

LOCAL3 = Path(__file__).resolve().parents[2] / "config/local3.yaml"
TINY = LanguageModel(layers=2, heads=2, width=16, context=8)


def as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def write_tokens(folder: Path, highest: int, **facts: object) -> None:
    for name in ("train.bin", "val.bin"):
        array("H", [highest, 7] * 200).tofile((folder / name).open("wb"))
    if facts:
        (folder / "tokens.json").write_text(json.dumps({"dtype": "uint16", **facts}))


def task_of(path: Path, *words: str) -> LanguageModelTask:
    return LanguageModelTask(load(LOCAL3, [f"data.path={path}", "model.context=8", *words]))


def test_a_missing_folder_and_a_short_text_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no folder or file"):
        task_of(tmp_path / "no")
    for n in range(3):
        (tmp_path / f"{n}").write_text("x")
    with pytest.raises(SettingsError, match="too short"):
        task_of(tmp_path)


def test_tokens_need_a_vocabulary_that_holds_them(tmp_path: Path) -> None:
    write_tokens(tmp_path, 511, vocabulary=512, tokenizer="")
    with pytest.raises(SettingsError, match="256 is less than the 512 of "):
        task_of(tmp_path)
    torch.manual_seed(1)
    task = task_of(tmp_path, "model.vocabulary=512")
    batch = torch.stack([task.train[0], task.train[1]])
    assert task.loss(task.model(), batch).item() == pytest.approx(math.log(512), abs=0.3)
    assert task.metrics(1.0) == {}
    assert task.summary(task.model(), {"loss": 1.25}) == [("validation", "loss 1.2500")]
    assert task.describe().startswith("0.00 M tokens of ")


def test_tokens_of_an_unknown_vocabulary_are_looked_at(tmp_path: Path) -> None:
    """nanoGPT's have no tokens.json; a token beyond the vocabulary would end the first step."""
    write_tokens(tmp_path, 50_256)
    with pytest.raises(SettingsError, match="256 is less than the 50257 of "):
        task_of(tmp_path)
    task_of(tmp_path, "model.vocabulary=50304")


@pytest.mark.slow
def test_a_run_ends_well_where_its_tokenizer_is_not(tmp_path: Path) -> None:
    write_tokens(tmp_path, 511, vocabulary=512, tokenizer="tokenizers:gone.json")
    task = task_of(tmp_path, "model.vocabulary=512")
    told = dict(task.summary(task.model(), {"loss": 1.25}))
    assert told["sample"] == (
        f"none: tokenizer tokenizers:gone.json: there is no file {tmp_path}/gone.json"
    )


@pytest.mark.slow
def test_a_model_may_know_more_tokens_than_its_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abcdefg" * 400)
    task = task_of(tmp_path / "text", "model.vocabulary=1024")
    assert "sample" in dict(task.summary(task.model(), {"loss": 1.0, "bits_per_byte": 1.0}))


def test_yardsticks_have_their_known_values() -> None:
    assert entropy(as_tensor(b"aaaa")) == 0
    assert entropy(as_tensor(b"abab" * 8)) == 1
    assert entropy(as_tensor(bytes(range(256)))) == pytest.approx(8)
    text = b"some text, some more text" * 40
    assert zlib_rate(as_tensor(text)) == 8 * len(zlib.compress(text, 9)) / len(text)


@pytest.mark.parametrize("ngrams", [0, 3])
def test_no_byte_sees_what_comes_after_it(ngrams: int) -> None:
    torch.manual_seed(0)
    model = GPT(TINY.model_copy(update={"ngrams": ngrams}))
    text = torch.arange(8)[None]
    changed = text.clone()
    changed[0, 5] = 200
    before, after = model(text), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


@pytest.mark.slow
def test_an_untrained_model_knows_nothing_and_a_trained_one_its_text(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}").write_text("abcdefg" * 40)
    task = task_of(tmp_path, "model.width=16", "model.layers=1")
    torch.manual_seed(0)
    model = task.model()
    batch = torch.stack([task.train[i] for i in range(16)])
    assert task.loss(model, batch).item() == pytest.approx(math.log(256), abs=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert task.loss(model, batch).item() < 0.1
    assert bytes(generate(model, b"abcd", 12)) == b"abcdefgabcdefgab"
    (label, text), _ = task.summary(model, {"loss": math.log(2), "bits_per_byte": 1.0})
    assert label == "validation"
    assert text.startswith("1.000 bits per byte (order-0 entropy 2.807, zlib -9 ")


def test_a_sample_cannot_harm_a_terminal() -> None:
    assert printable("a\n\tü".encode() + b"\x1b[2J\r\xff\x00") == "a\n\tü\ufffd[2J" + 3 * "\ufffd"


def test_the_weight_counts_predicted_bytes() -> None:
    task = LanguageModelTask(load(LOCAL3))
    assert task.weight(torch.zeros(4, 129, dtype=torch.uint8)) == 4 * 128
    assert task.metrics(math.log(2)) == {"bits_per_byte": pytest.approx(1)}
