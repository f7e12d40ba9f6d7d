"""The built-in task: its text, its split, its model and its yardsticks."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from training.config_file import SettingsError
from training.settings import LanguageModel, Settings, load
from training.tasks import language_model
from training.tasks.language_model import (
    GPT,
    LanguageModelTask,
    Windows,
    entropy,
    generate,
    load_text,
    printable,
    text_files,
    zlib_rate,
)

LOCAL3 = Path(__file__).resolve().parents[2] / "config/local3.yaml"
TINY = LanguageModel(layers=2, heads=2, width=16, context=8)


def write_files(folder: Path, count: int) -> None:
    for n in range(count):
        (folder / f"{n}.txt").write_text(f"text {n}\n" * 20)


def as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def tiny_model() -> GPT:
    torch.manual_seed(0)
    return GPT(TINY)


def test_without_a_path_it_reads_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "MAX_BYTES", 8_000_000)
    train, validation = load_text(None)
    assert len(validation) == 131_072 + 1
    assert 6_000_000 < len(train) < 8_000_000
    names = {path.parts for _, path in text_files(None)}
    assert all(parts[-1].endswith(".py") for parts in names)
    assert not any({"site-packages", "test", "tests"} & set(parts) for parts in names)


def test_a_file_stays_on_its_side_when_others_come(tmp_path: Path) -> None:
    write_files(tmp_path, 60)
    train, validation = load_text(str(tmp_path))
    write_files(tmp_path, 120)
    more_train, more_validation = load_text(str(tmp_path))
    lines, held_out = set(train.splitlines()), set(validation.splitlines())
    assert len(lines) + len(held_out) == 60
    assert 0 < len(held_out) < 12
    assert lines <= set(more_train.splitlines())
    assert held_out <= set(more_validation.splitlines())


def test_two_files_are_enough_and_one_is_not(tmp_path: Path) -> None:
    write_files(tmp_path, 1)
    with pytest.raises(SettingsError, match="fewer than two text files"):
        load_text(str(tmp_path))
    write_files(tmp_path, 2)
    train, validation = load_text(str(tmp_path))
    assert train and validation and train != validation


def test_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    write_files(tmp_path, 3)
    (tmp_path / "picture.txt").write_bytes(b"PNG\0\0\0" * 100)
    (tmp_path / ".hidden").write_text("secret" * 100)
    (tmp_path / "gone.txt").symlink_to("nowhere")
    both = b"".join(load_text(str(tmp_path)))
    assert b"PNG" not in both
    assert b"secret" not in both


def test_no_more_is_read_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, 50)
    monkeypatch.setattr(language_model, "MAX_BYTES", 4000)
    monkeypatch.setattr(language_model, "VALIDATION_BYTES", 50)
    train, validation = load_text(str(tmp_path))
    assert 3000 < len(train) < 4000
    assert len(validation) == 51


def test_a_missing_folder_and_a_short_text_are_one_line(tmp_path: Path) -> None:
    def task_of(path: Path) -> Settings:
        return load(LOCAL3, [f"data.path={path}"])

    with pytest.raises(SettingsError, match="there is no folder"):
        LanguageModelTask(task_of(tmp_path / "no"))
    for n in range(3):
        (tmp_path / f"{n}").write_text("short")
    with pytest.raises(SettingsError, match="too short"):
        LanguageModelTask(task_of(tmp_path))


@pytest.mark.parametrize("length", [9, 16, 17, 100])
def test_windows_predict_every_byte_once(length: int) -> None:
    windows = Windows(bytes(range(length)), 8)
    inputs = torch.cat([windows[i][:-1] for i in range(len(windows))])
    targets = torch.cat([windows[i][1:] for i in range(len(windows))])
    predicted = (length - 1) // 8 * 8
    assert inputs.tolist() == list(range(predicted))
    assert targets.tolist() == list(range(1, predicted + 1))


def test_yardsticks_have_their_known_values() -> None:
    assert entropy(as_tensor(b"aaaa")) == 0
    assert entropy(as_tensor(b"abab" * 8)) == 1
    assert entropy(as_tensor(bytes(range(256)))) == pytest.approx(8)
    text = b"some text, some more text" * 40
    assert zlib_rate(as_tensor(text)) == 8 * len(zlib.compress(text, 9)) / len(text)


def test_the_model_of_local3_has_the_size_it_says() -> None:
    settings = load(LOCAL3)
    assert isinstance(settings.model, LanguageModel)
    size = sum(parameter.numel() for parameter in GPT(settings.model).parameters())
    assert 0.8e6 < size < 0.9e6


def test_no_byte_sees_what_comes_after_it() -> None:
    model = tiny_model()
    text = torch.arange(8)[None]
    changed = text.clone()
    changed[0, 5] = 200
    before, after = model(text), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_an_untrained_model_knows_nothing_and_a_trained_one_its_text(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}").write_text("abcdefg" * 40)
    overrides = [f"data.path={tmp_path}", "model.context=8", "model.width=16", "model.layers=1"]
    task = LanguageModelTask(load(LOCAL3, overrides))
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
    assert generate(model, b"abcd", 12) == b"abcdefgabcdefgab"
    (label, text), _ = task.summary(model, math.log(2))
    assert label == "validation"
    assert text.startswith("1.000 bits per byte (order-0 entropy 2.807, zlib -9 ")


def test_a_sample_is_the_same_each_time_and_leaves_the_generators_alone() -> None:
    model = tiny_model()
    state = torch.get_rng_state()
    assert generate(model, b"ab", 30) == generate(model, b"ab", 30)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sample_cannot_harm_a_terminal() -> None:
    assert printable("a\n\tü".encode() + b"\x1b[2J\r\xff\x00") == "a\n\tü\ufffd[2J" + 3 * "\ufffd"


def test_the_weight_counts_predicted_bytes() -> None:
    task = LanguageModelTask(load(LOCAL3))
    assert task.weight(torch.zeros(4, 129, dtype=torch.uint8)) == 4 * 128
    assert task.metrics(math.log(2)) == {"bits_per_byte": pytest.approx(1)}
