"""python -m training.plot, training.sample and training.prepare; the built-in task."""

import importlib
import json
import math
import struct
import zlib
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import test_checkpoint
import torch
from agents import ROOT, written
from torch import Tensor

from distributed.checkpoint import State
from training import plot, prepare, sample
from training.config_file import SettingsError
from training.settings import LanguageModel, load
from training.tasks.data import Windows, find_corpus
from training.tasks.language_model import (
    GPT,
    LanguageModelTask,
    entropy,
    generate,
    printable,
    zlib_rate,
)
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
    assert curves["loss"][-1] == (19, 9.5)  # the last line is incomplete


def test_a_run_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.main(["none"]) == 2
    told = capsys.readouterr().err
    assert told == "plot: there is no logs/none/metrics.jsonl; give a run id or its log folder\n"


# --- python -m training.sample --------------------------------------------------------------------


LOCAL3 = ROOT / "config/local3.yaml"


def save(folder: Path, text: Path, *more: str) -> None:
    overrides = ["model.layers=1", "model.width=16", "model.context=8", f"data.path={text}", *more]
    settings = load(LOCAL3, overrides)
    torch.manual_seed(0)
    model = GPT(settings.model)
    progress = {"step": 3, "settings": settings.as_tree()}
    state = State(model.state_dict(), {"state": {}, "param_groups": []}, progress, [])
    test_checkpoint.save(folder, 3, state, keep_last=1)


def test_a_sample_goes_on_from_the_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = written(tmp_path / "text", "some words " * 100)
    save(tmp_path / "run", text)
    told = []
    for seed in ("1", "1", "2"):
        words = [str(tmp_path / "run"), "--prompt", "def f", "--length", "9", "--seed", seed]
        assert sample.main(words) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] != told[2]  # the same for the same seed
    assert all(one.startswith("def f") and len(one) <= 15 for one in told)  # 9 bytes, as text
    text.unlink()  # not needed: bytes are tokens for any text
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
    assert capsys.readouterr().err == f"sample: {tmp_path} holds no checkpoint; give another run\n"


def test_a_checkpoint_of_another_script_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    test_checkpoint.save(run, 3, State({}, {}, {"step": 3}, []), keep_last=1)
    assert sample.main([str(run)]) == 2
    refusal = f"sample: {run} was not trained with the task language_model\n"
    assert capsys.readouterr().err == refusal


@pytest.mark.parametrize("option", ["--length=0", "--temperature=-1"])
def test_what_cannot_be_drawn_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sample.main([str(tmp_path), option])
    assert "--length must be 1 or more, --temperature 0 or more" in capsys.readouterr().err


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
    assert "skipped a.png (not text)" in out and " tokens of " in out
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
    monkeypatch.setattr(prepare, "CHUNK", 100)  # several chunks per file
    assert prepare.main(["text", "--to", "tokens", "--tokenizer", "tokenizers:mine.json"]) == 0
    facts = json.loads(Path("tokens/tokens.json").read_text())
    assert facts == {"dtype": "uint16", "vocabulary": 300, "tokenizer": "tokenizers:mine.json"}
    corpus = find_corpus("tokens")
    tokenizer = Tokenizer(corpus.tokenizer, corpus.folder)  # the tokenizer's file was copied
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
    for to, cause in (("tokens", "already has a train.bin"), ("text", "is a file")):
        assert prepare.main([*words, str(tmp_path / to)]) == 2
        told = f"prepare: {tmp_path / to} {cause}; name another folder, or delete it\n"
        assert capsys.readouterr().err == told


# --- the built-in task ----------------------------------------------------------------------------


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
    with pytest.raises(SettingsError, match=r"vocabulary is 256, but .* needs at least 512"):
        task_of(tmp_path)
    torch.manual_seed(1)
    task = task_of(tmp_path, "model.vocabulary=512")
    batch = torch.stack([task.train[0], task.train[1]])
    assert task.loss(task.model(), batch).item() == pytest.approx(math.log(512), abs=0.3)
    assert task.metrics(1.0) == {}
    assert task.summary(task.model(), {"loss": 1.25}) == [("validation", "loss 1.2500")]
    assert task.describe().startswith("0.00 M tokens of ")


def test_tokens_of_an_unknown_vocabulary_are_looked_at(tmp_path: Path) -> None:
    """nanoGPT's files lack tokens.json; tokens beyond the vocabulary would break the first step."""
    write_tokens(tmp_path, 50_256)
    with pytest.raises(SettingsError, match=r"vocabulary is 256, but .* needs at least 50257"):
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
    model = GPT(replace(TINY, ngrams=ngrams))
    text = torch.arange(8)[None]
    changed = text.clone()
    changed[0, 5] = 200
    before, after = model(text), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_a_model_that_writes_slowly_is_not_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        (tmp_path / f"{n}").write_text("abcdefg" * 40)
    beats: list[int] = []
    monkeypatch.setattr("training.tasks.language_model.beat", lambda: beats.append(1))
    generate(task_of(tmp_path, "model.width=16", "model.layers=1").model(), b"abcd", 12)
    assert len(beats) == 12


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
