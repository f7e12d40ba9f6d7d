"""What the built-in task reads: its files, their two sides, and their windows."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import CONFIG, ROOT, in_turns, ratio, run

from training.config_file import SettingsError
from training.tasks.data import (
    OPEN_FILES,
    Piece,
    Windows,
    find_corpus,
    text_files,
)


def write_files(folder: Path, count: int) -> None:
    for n in range(count):
        (folder / f"{n}.txt").write_text(f"text {n}\n" * 20)


def content(pieces: Sequence[Piece]) -> bytes:
    return b"".join(p.path.read_bytes()[p.start : p.start + p.size] for p in pieces)


def sides(folder: Path) -> tuple[bytes, bytes]:
    corpus = find_corpus(str(folder))
    return content(corpus.train), content(corpus.validation)


def test_without_a_path_it_reads_the_standard_library() -> None:
    corpus = find_corpus(None)
    assert sum(piece.size for piece in corpus.train) > 6_000_000
    assert corpus.name == "the standard library" and corpus.is_text
    names = {path.parts for _, path in text_files(None)}
    assert all(parts[-1].endswith(".py") for parts in names)
    assert not any({"site-packages", "test", "tests"} & set(parts) for parts in names)


def test_a_file_stays_on_its_side_when_others_come(tmp_path: Path) -> None:
    write_files(tmp_path, 60)
    train, validation = sides(tmp_path)
    write_files(tmp_path, 120)
    more_train, more_validation = sides(tmp_path)
    lines, held_out = set(train.splitlines()), set(validation.splitlines())
    assert len(lines) + len(held_out) == 60
    assert 0 < len(held_out) < 12
    assert lines <= set(more_train.splitlines())
    assert held_out <= set(more_validation.splitlines())


def test_two_files_are_enough_and_one_is_split_where_it_is_named(tmp_path: Path) -> None:
    write_files(tmp_path, 1)
    with pytest.raises(SettingsError, match="fewer than two text files; name a file to split"):
        find_corpus(str(tmp_path))
    write_files(tmp_path, 2)
    train, validation = sides(tmp_path)
    assert train and validation and train != validation
    file = tmp_path / "0.txt"
    train, validation = sides(file)
    assert train + validation == file.read_bytes()
    assert len(validation) == 8  # of 140, in whole tokens of every size


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    write_files(tmp_path, 3)
    (tmp_path / "picture.txt").write_bytes(b"PNG\0\0\0" * 100)
    (tmp_path / ".hidden").write_text("secret" * 100)
    (tmp_path / "gone.txt").symlink_to("nowhere")
    for name in ("tests", "site-packages"):  # left out of the standard library alone
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(f"of {name} ")
    corpus = find_corpus(str(tmp_path))
    both = content([*corpus.train, *corpus.validation])
    assert b"PNG" not in both and b"secret" not in both
    assert b"of tests " in both and b"of site-packages " in both
    assert corpus.left_out == ["picture.txt (not text)"]


def test_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, 3)
    (tmp_path / "secret").mkdir()
    scan = os.scandir

    def refuse(path: str) -> Any:  # as for a user who may not
        if path.endswith("secret"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert find_corpus(str(tmp_path)).left_out == ["secret (Permission denied)"]


def test_tokens_as_nano_gpt_writes_them(tmp_path: Path) -> None:
    array("H", range(300)).tofile((tmp_path / "train.bin").open("wb"))
    with pytest.raises(SettingsError, match=r"has a train.bin and no val.bin; add it"):
        find_corpus(str(tmp_path))
    array("H", [5, 6]).tofile((tmp_path / "val.bin").open("wb"))
    corpus = find_corpus(str(tmp_path))
    assert not corpus.is_text and corpus.tokenizer == ""
    windows = Windows(corpus.train, 9, corpus.dtype)
    assert (windows.size, len(windows)) == (300, 33)
    assert windows[32].tolist() == list(range(288, 298))
    corpus = find_corpus(str(tmp_path / "train.bin"))
    assert content(corpus.train) + content(corpus.validation) == array("H", range(300)).tobytes()
    (tmp_path / "tokens.json").write_text(json.dumps({"dtype": "int64"}))
    with pytest.raises(SettingsError, match="dtype 'int64' is none of uint8, uint16, uint32"):
        find_corpus(str(tmp_path))
    for damaged in ("", "[1, 2]", '{"dtype": "uin'):
        (tmp_path / "tokens.json").write_text(damaged)
        with pytest.raises(SettingsError, match="is damaged; prepare the tokens again"):
            find_corpus(str(tmp_path))


@pytest.mark.parametrize("length", [9, 16, 17, 100])
@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_windows_predict_every_token_once(tmp_path: Path, length: int, pieces: int) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(bytes(range(length)))
    ends = sorted({length * n // pieces for n in range(pieces + 1)})
    parts = [Piece(file, start, end - start) for start, end in itertools.pairwise(ends)]
    windows = Windows([*parts, Piece(file, 0, 0)], 8, torch.uint8)
    inputs = torch.cat([windows[i][:-1] for i in range(len(windows))])
    targets = torch.cat([windows[i][1:] for i in range(len(windows))])
    predicted = (length - 1) // 8 * 8
    assert inputs.tolist() == list(range(predicted))
    assert targets.tolist() == list(range(1, predicted + 1))


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    files = [tmp_path / str(n) for n in range(OPEN_FILES + 100)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number % 256]) * 10)
    windows = Windows([Piece(file, 0, 10) for file in files], 9, torch.uint8)
    before = len(os.listdir("/proc/self/fd"))
    assert all(windows[n].numel() == 10 for n in range(len(windows)))
    assert len(os.listdir("/proc/self/fd")) <= before + OPEN_FILES


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"x" * 100)
    windows = Windows([Piece(file, 0, 100)], 9, torch.uint8)
    file.write_bytes(b"x" * 50)
    with pytest.raises(OSError, match="text is shorter than it was at the start; restore it"):
        windows[8]


@pytest.mark.parametrize(("most", "windows"), [(8, 0), (9, 1), (17, 2), (24, 2), (99, 3)])
def test_only_the_first_tokens_count(tmp_path: Path, most: int, windows: int) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(bytes(range(25)))
    found = Windows([Piece(file, 0, 10), Piece(file, 10, 15)], 8, torch.uint8, most)
    assert (found.size, len(found)) == (min(most, 25), windows)
    with pytest.raises(IndexError):
        found[windows]


@pytest.mark.long
@pytest.mark.alone
def test_a_start_takes_as_long_with_2_gb_of_text_as_with_20_mb(tmp_path: Path) -> None:
    """In turns, to the end of the first step: at most 1.2 times as long, and 0.1 GB more memory."""
    line = " ".join(f"line {number}\n" for number in range(125_000))[:1_000_000]
    for count in (20, 2000):
        (tmp_path / str(count)).mkdir()
        for number in range(count):
            (tmp_path / str(count) / f"{number}.txt").write_text(line)

    def start(count: int) -> tuple[float, float]:
        run_id = f"{count}-{time.monotonic_ns()}"
        settings = [f"data.path={tmp_path / str(count)}", f"checkpoint.dir={tmp_path / run_id}"]
        settings += ["train.max_steps=20", "train.log_every=20", "train.eval_every=0"]
        script, began = ROOT / "scripts/ssh/launch_singlenode.sh", time.time()
        own = {"PYTHON": sys.executable, "RUN_ID": run_id, "LOG_DIR": str(tmp_path)}
        run(script, CONFIG, 2, *settings, "checkpoint.every=0", **own)
        lines = (tmp_path / run_id / "metrics.jsonl").read_text().splitlines()
        first, last = json.loads(lines[0]), json.loads(lines[-1])
        return first["time"] - began, last["peak_memory_gb"]

    cases = {count: functools.partial(start, count) for count in (20, 2000)}
    found = in_turns(cases, 5, warm_up=1)
    (short_s, short_gb), (long_s, long_gb) = (zip(*found[count], strict=True) for count in cases)
    assert ratio(long_s, short_s) < 1.2
    assert statistics.median(long_gb) - statistics.median(short_gb) < 0.1
