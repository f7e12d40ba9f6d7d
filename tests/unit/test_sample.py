"""python -m training.sample: text from a checkpoint of the built-in model."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from distributed.checkpoint import Saver, State
from training import sample
from training.settings import load
from training.tasks.language_model import GPT

LOCAL3 = Path(__file__).resolve().parents[2] / "config/local3.yaml"


def save(folder: Path, text: Path, *more: str) -> None:
    overrides = ["model.layers=1", "model.width=16", "model.context=8", f"data.path={text}", *more]
    settings = load(LOCAL3, overrides)
    torch.manual_seed(0)
    model = GPT(settings.model)
    progress = {"step": 3, "settings": settings.model_dump(mode="json")}
    saver = Saver(folder, keep_last=1)
    saver.save(3, State(model.state_dict(), {"state": {}, "param_groups": []}, progress, []))
    saver.wait()


def test_a_sample_goes_on_from_the_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("some words " * 100)
    save(tmp_path / "run", text)
    told = []
    for seed in ("1", "1", "2"):
        words = [str(tmp_path / "run"), "--prompt", "def f", "--length", "9", "--seed", seed]
        assert sample.main(words) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] != told[2]
    assert all(one.startswith("def f") and len(one) <= 15 for one in told)  # 9 bytes, as text
    text.unlink()  # a byte is a token, whatever it was trained on
    assert sample.main([str(tmp_path / "run")]) == 0


def test_it_needs_nothing_that_only_the_training_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_tracker.py").write_text("class Mine: pass")
    monkeypatch.syspath_prepend(tmp_path)
    save(tmp_path / "run", tmp_path / "text", "tracking=[my_tracker:Mine]")
    (tmp_path / "my_tracker.py").unlink()
    importlib.invalidate_caches()
    assert sample.main([str(tmp_path / "run"), "--length", "3"]) == 0
    assert "def" in capsys.readouterr().out


def test_without_a_checkpoint_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sample.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"sample: {tmp_path} holds no checkpoint\n"


@pytest.mark.parametrize("option", ["--length=0", "--temperature=-1"])
def test_what_cannot_be_drawn_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sample.main([str(tmp_path), option])
    assert "--length is 1 or more, --temperature 0 or more" in capsys.readouterr().err
