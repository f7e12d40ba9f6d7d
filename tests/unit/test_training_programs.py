"""The programs beside train.py: python -m training.plot, training.sample, training.prepare."""

from __future__ import annotations

import importlib
import json
import struct
from pathlib import Path

import pytest
import torch
from agents import ROOT

from distributed.checkpoint import Saver, State
from training import plot, prepare, sample
from training.config_file import SettingsError
from training.settings import load
from training.tasks.data import Windows, find_corpus
from training.tasks.language_model import GPT
from training.tokenizer import Tokenizer


def write(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True)
    lines = [{"step": step, **dict.fromkeys(names, step * 0.5)} for step in range(1, 20)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 20, "lo')


def size_of(picture: Path) -> tuple[int, ...]:
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


@pytest.mark.slow
def test_runs_are_drawn_in_a_size_for_a_slide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "logs/one", "loss", "validation_loss", "lr", "tokens_per_second", "grad_norm")
    write(tmp_path / "elsewhere/two", "loss")
    assert plot.main(["one", "elsewhere/two", "--to", "both.png"]) == 0
    assert capsys.readouterr().out == "both.png\n"
    assert size_of(tmp_path / "both.png") == (1280, 720)
    assert plot.main(["elsewhere/two"]) == 0
    assert size_of(tmp_path / "elsewhere/two/runs.png") == (1280, 720)


def test_a_picture_lies_beside_its_runs_and_two_of_one_name_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[list[str]] = []
    monkeypatch.setattr(plot, "draw", lambda runs, to: told.append([*runs, str(to)]))
    for folder in ("logs/one", "mine/two", "mine/three", "a/same", "b/same"):
        write(tmp_path / folder, "loss")
    assert plot.main(["one"]) == plot.main(["a/same", "b/same"]) == 0
    monkeypatch.setenv("LOG_DIR", "mine")
    assert plot.main(["two", "three"]) == 0
    assert told == [
        ["one", "logs/one/runs.png"],
        ["a/same", "b/same", "a/runs.png"],
        ["two", "three", "mine/runs.png"],
    ]


def test_each_panel_shows_its_metrics(tmp_path: Path) -> None:
    write(tmp_path / "run", "loss", "validation_loss", "lr", "samples_per_second", "validation_x")
    curves = plot._curves(plot.read_metrics(tmp_path / "run/metrics.jsonl"))
    assert {panel: plot._shown(curves, panel) for panel in plot.PANELS} == {
        "loss": ["loss", "validation_loss"],
        "speed": ["samples_per_second"],
        "learning rate": ["lr"],
        "gradient norm": [],
    }
    assert curves["loss"][-1] == (19, 9.5)  # the last line is half a line


def test_a_run_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.main(["none"]) == 2
    told = capsys.readouterr().err
    assert (
        told == "plot: there is no logs/none/metrics.jsonl; give a run id, or its folder of logs\n"
    )


# --- python -m training.sample --------------------------------------------------------------------


LOCAL3 = ROOT / "config/local3.yaml"


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
    assert told[0] == told[1] != told[2]  # of a seed always the same
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


# --- python -m training.prepare -------------------------------------------------------------------


TEXT = "def f(x):\n    return x + 1\n"


def write_text(folder: Path) -> None:
    folder.mkdir()
    for n in range(40):
        (folder / f"{n}.py").write_text(f"# {n}\n{TEXT}" * 30)


def all_tokens(folder: Path) -> list[list[int]]:
    corpus = find_corpus(str(folder))
    both = [Windows(side, 1, corpus.dtype) for side in (corpus.train, corpus.validation)]
    windows = [[side[n] for n in range(len(side))] for side in both]
    return [[*(int(one[0]) for one in side), int(side[-1][1])] for side in windows]


def test_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path / "text")
    (tmp_path / "text" / "a.png").write_bytes(b"\0")
    assert prepare.main([str(tmp_path / "text"), "--to", str(tmp_path / "tokens")]) == 0
    out = capsys.readouterr().out
    assert "left out a.png (not text)" in out and " tokens of " in out
    text, tokens = (find_corpus(str(tmp_path / name)) for name in ("text", "tokens"))
    sizes = [sum(piece.size for piece in side) for side in (text.train, text.validation)]
    assert [len(side) for side in all_tokens(tmp_path / "tokens")] == sizes
    assert tokens.is_text and tokens.vocabulary == 256
    assert prepare.main([str(tmp_path / "none"), "--to", str(tmp_path)]) == 2
    assert "prepare: data.path: there is no folder or file" in capsys.readouterr().err


def test_a_tokenizer_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    write_text(tmp_path / "text")
    made = tokenizers.ByteLevelBPETokenizer()
    files = [str(file) for file in (tmp_path / "text").iterdir()]
    made.train(files, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    made.save(str(tmp_path / "mine.json"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "CHUNK", 100)  # several for each file
    assert prepare.main(["text", "--to", "tokens", "--tokenizer", "tokenizers:mine.json"]) == 0
    facts = json.loads(Path("tokens/tokens.json").read_text())
    assert facts == {"dtype": "uint16", "vocabulary": 300, "tokenizer": "tokenizers:mine.json"}
    corpus = find_corpus("tokens")
    tokenizer = Tokenizer(corpus.tokenizer, corpus.folder)  # the file went along
    train, validation = all_tokens(Path("tokens"))
    assert tokenizer.end is not None
    assert train.count(tokenizer.end) + validation.count(tokenizer.end) == 40
    first = train[: train.index(tokenizer.end)]
    assert tokenizer.decode(first).decode() in {Path(file).read_text() for file in files}


WRONG = ["gpt2", "tiktoken:", "tokenizers:none.json", "tokenizers:", f"tokenizers:{__file__}"]


@pytest.mark.parametrize("name", WRONG)
def test_a_tokenizer_that_is_not_there(name: str) -> None:
    with pytest.raises(SettingsError, match="tokenizer "):
        Tokenizer(name)


def test_tokens_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("text\n" * 100)
    words = [str(tmp_path / "text"), "--to"]
    assert prepare.main([*words, str(tmp_path / "tokens")]) == 0
    capsys.readouterr()
    for to, cause in (("tokens", "has a train.bin already"), ("text", "is a file")):
        assert prepare.main([*words, str(tmp_path / to)]) == 2
        told = f"prepare: {tmp_path / to} {cause}; name another folder, or delete it\n"
        assert capsys.readouterr().err == told
