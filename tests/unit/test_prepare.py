"""python -m training.prepare: text becomes tokens that the built-in task reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from training import prepare
from training.config_file import SettingsError
from training.tasks.data import Windows, find_corpus
from training.tokenizer import Tokenizer

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


def test_tokens_are_not_prepared_again(tmp_path: Path) -> None:
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(b"ab")
    with pytest.raises(SettingsError, match="holds tokens already"):
        prepare.prepare(str(tmp_path), tmp_path, Tokenizer("bytes"))


def test_tokens_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("text\n" * 100)
    words = [str(tmp_path / "text"), "--to"]
    assert prepare.main([*words, str(tmp_path / "tokens")]) == 0
    capsys.readouterr()
    for to, cause in (
        ("tokens", "has a train.bin already"),
        ("text", "is a file"),
    ):
        assert prepare.main([*words, str(tmp_path / to)]) == 2
        told = f"prepare: {tmp_path / to} {cause}; name another folder, or delete it\n"
        assert capsys.readouterr().err == told
