"""The data of the built-in task: files and windows; the stream of batches."""

import errno
import functools
import gc
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from array import array
from collections import Counter, OrderedDict, UserDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy
import pytest
import torch
from harness import CONFIG, ROOT, in_turns, ratio, run
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from distributed import loader
from distributed.environment import detect
from distributed.torch import seed_everything
from training import batches
from training.batches import Batches, move, share_of, shuffled
from training.config_file import SettingsError
from training.prepare import encode
from training.settings import Data, Settings, Train
from training.tasks import Task
from training.tasks.data import (
    OPEN_FILES,
    Piece,
    Windows,
    find_corpus,
    visible_files,
)
from training.tokenizer import Tokenizer


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
    names = {path.parts for _, path in visible_files(None, print)}
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
    with pytest.raises(SettingsError, match="fewer than two text files; add files, or give one"):
        find_corpus(str(tmp_path))
    write_files(tmp_path, 2)
    train, validation = sides(tmp_path)
    assert train and validation and train != validation
    file = tmp_path / "0.txt"
    train, validation = sides(file)
    assert train + validation == file.read_bytes()
    assert len(validation) == 8  # of 140 bytes; a multiple of every token size


def test_what_is_not_text_is_skipped_and_named(tmp_path: Path) -> None:
    write_files(tmp_path, 3)
    (tmp_path / "picture.txt").write_bytes(b"PNG\0\0\0" * 100)
    (tmp_path / ".hidden").write_text("secret" * 100)
    (tmp_path / "gone.txt").symlink_to("nowhere")
    for name in ("tests", "site-packages"):  # omitted only from the standard library
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(f"of {name} ")
    corpus = find_corpus(str(tmp_path))
    both = content([*corpus.train, *corpus.validation])
    assert b"PNG" not in both and b"secret" not in both
    assert b"of tests " in both and b"of site-packages " in both
    assert corpus.skipped == ["picture.txt (not text)"]


def test_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, 3)
    (tmp_path / "secret").mkdir()
    scan = os.scandir

    def refuse(path: str) -> Any:  # as for a user without permission
        if path.endswith("secret"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert find_corpus(str(tmp_path)).skipped == ["secret (Permission denied)"]


def test_tokens_as_nano_gpt_writes_them(tmp_path: Path) -> None:
    array("H", range(300)).tofile((tmp_path / "train.bin").open("wb"))
    with pytest.raises(SettingsError, match=r"has a train.bin but no val.bin; add it"):
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
    with pytest.raises(SettingsError, match="dtype 'int64' is not one of uint8, uint16, uint32"):
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
    with pytest.raises(OSError, match="text is shorter than when the run started; restore it"):
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
    """With 2 GB, a first step takes up to 1.2 times as long; a run needs up to 0.1 GB more RAM."""
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


# --- the stream of batches ------------------------------------------------------------------------


class Given(Task):
    """A task with this data."""

    def __init__(self, data: Any) -> None:
        self.train, self.validation = data, TensorDataset(torch.empty(0))

    def model(self) -> nn.Module:
        raise AssertionError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError


def stream_of(
    data: Any, rank: int = 0, *, ranks: int = 1, at: Any = batches.START, workers: int = 0
) -> Batches:
    """Return one rank's batches of 4; `data` is a task, or the data of one."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    train = Train(batch_size=1, max_seconds=1)
    settings = Settings(seed=3, train=train, data=Data(num_workers=workers))
    task = data if isinstance(data, Given) else Given(data)
    with mock.patch.multiple(loader, count_ranks=lambda: ranks, own_rank=lambda: rank):
        return Batches(task, 4, settings, detect(place), at)


@pytest.mark.parametrize("length", [1, 7, 256, 1000, 70_000])
@pytest.mark.parametrize("block", [1, 256])
def test_each_sample_comes_once(length: int, block: int) -> None:
    order = list(shuffled(length, block, "1 0"))
    assert sorted(order) == list(range(length))
    if length > 7:
        assert order != sorted(order)
        assert order != list(shuffled(length, block, "1 1"))


@pytest.mark.parametrize("skip", [0, 1, 31, 32, 33, 64, 99, 100, 101])
def test_it_goes_on_from_any_sample(monkeypatch: pytest.MonkeyPatch, skip: int) -> None:
    monkeypatch.setattr(batches, "GROUP", 32)
    whole = list(shuffled(100, 8, "1 0"))
    assert list(shuffled(100, 8, "1 0", skip)) == whole[skip:]


def test_samples_that_come_together_are_of_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "GROUP", 1024)
    order = list(shuffled(100_000, 256, "1 0"))
    first = {sample // 256 for sample in order[:1024]}
    assert len(first) <= 5
    assert len({sample // 256 for sample in order[:8]}) > 1


@pytest.mark.parametrize("done", range(9))
def test_a_stream_opened_anywhere_goes_on_as_if_it_had_come_there(done: int) -> None:
    dataset = TensorDataset(torch.arange(17))
    whole = stream_of(dataset)
    for _ in range(done):
        next(whole)
    opened = stream_of(dataset, at=whole.position())
    assert opened.position() == {"epoch": done // 4, "samples": done % 4 * 4}
    expected = [next(whole)[0].tolist() for _ in range(9)]
    assert [next(opened)[0].tolist() for _ in range(9)] == expected
    assert opened.position() == whole.position()


@pytest.mark.parametrize("rank", [0, 1])
def test_batches_are_named_by_their_samples(rank: int) -> None:
    stream = stream_of(TensorDataset(torch.arange(17)), rank, ranks=2)
    read: list[str] = []
    for _ in range(7):  # more than three epochs
        with pytest.raises(ValueError, match=r"^broken") as raised, stream.naming_samples(-1):
            raise ValueError("broken")
        read += map(str, next(stream)[0].tolist())
        assert stream.describe() == f"samples {', '.join(read[-4:])}"
        assert raised.value.__notes__ == [f"the batch has {stream.describe()}"]  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"^broken") as raised, stream.naming_samples():
            raise ValueError("broken")
        assert raised.value.__notes__ == [f"the batch has {stream.describe()}"]  # type: ignore[attr-defined]
    assert stream.describe(back=2, count=3) == f"samples {', '.join(read[8:20])}"
    assert stream.describe(back=0, count=7) == f"samples {', '.join(read[:16])}, ..."


def test_samples_without_numbers_have_no_names() -> None:
    stream = stream_of(Stream(22))
    next(stream)
    assert stream.describe() == ""
    with pytest.raises(ValueError, match=r"^broken") as raised, stream.naming_samples():
        raise ValueError("broken")
    assert not hasattr(raised.value, "__notes__")


class Drawn(Dataset[Any]):
    """Every sample is three random numbers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1).item(), random.random(), float(numpy.random.rand())


def test_a_worker_draws_by_sample_not_by_what_it_read_before() -> None:
    def draw(workers: int, done: int) -> list[list[list[float]]]:
        position = {"epoch": done // 3, "samples": done % 3 * 4}
        batches = stream_of(Drawn(), at=position, workers=workers)
        return [torch.stack(next(batches)).tolist() for _ in range(6 - done)]

    whole = draw(1, 0)
    assert draw(2, 0) == whole
    assert draw(2, 4) == whole[4:]
    assert len({number for batch in whole for numbers in batch for number in numbers}) == 72


def test_a_stream_and_its_workers_end_with_what_reads_it() -> None:
    """Otherwise its workers would delay the end of the process by half a minute."""
    before = {child.pid for child in multiprocessing.active_children()}
    stream = stream_of(Drawn(), workers=1)
    next(stream)
    (worker,) = [one for one in multiprocessing.active_children() if one.pid not in before]
    gc.disable()
    try:
        del stream
        worker.join(20)
    finally:
        gc.enable()
    assert not worker.is_alive()


def test_shares_are_uneven_and_hold_each_sample_once() -> None:
    dataset = TensorDataset(torch.arange(10))
    shares = [share_of(dataset, rank=rank, world_size=4) for rank in range(4)]
    found = [[int(share[i][0]) for i in range(len(share))] for share in shares]  # type: ignore[arg-type]
    assert [len(share) for share in found] == [3, 3, 2, 2]
    assert sorted(n for share in found for n in share) == list(range(10))


def test_batches_of_any_build_move() -> None:
    here = torch.device("meta")
    moved = move({"a": [torch.ones(1), (torch.ones(2), "text")]}, here)
    assert moved["a"][0].device == moved["a"][1][0].device == here
    assert moved["a"][1][1] == "text"


class Kept(dict[str, Any]):
    """A dict with an attribute, which a copy keeps."""

    length = 1


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding."""

    def to(self, device: torch.device) -> "Encoding":
        return Encoding({name: value.to(device) for name, value in self.data.items()})


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, Kept, Encoding])
def test_batches_that_are_like_a_dict_move(kind: Any) -> None:
    batch = kind(tokens=torch.ones(2))
    if kind is Kept:
        batch.length = 2
    moved, _ = move((batch, "text"), torch.device("meta"))
    assert type(moved) is kind and moved["tokens"].is_meta
    assert batch["tokens"].device.type == "cpu"  # others may still use it
    assert getattr(moved, "length", 2) == 2


class Ends(NamedTuple):
    """A tuple with a field of this name."""

    source: Tensor
    to: Tensor


class Dotted(dict[str, Any]):
    """A dict whose keys are attributes, also those that it lacks."""

    __getattr__ = dict.get


class Moved:
    """Moves in place, and returns nothing."""

    def to(self, device: torch.device) -> None:
        self.device = device


def test_a_method_to_is_no_field_or_key_of_that_name() -> None:
    meta = torch.device("meta")
    ends = move(Ends(torch.ones(1), torch.ones(1)), meta)
    assert type(ends) is Ends and ends.to.is_meta
    assert move(Dotted(a=torch.ones(1)), meta)["a"].is_meta
    moved = Moved()
    assert move([moved], meta) == [moved] and moved.device == meta


def test_counts_stay_as_they_are() -> None:
    assert move({"n": Counter(a=3)}, torch.device("meta")) == {"n": Counter(a=3)}


def test_packed_sequences_move() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert move([packed], torch.device("meta"))[0].data.is_meta


class Stream(IterableDataset[int]):
    """Can only be read in order."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


@pytest.mark.parametrize("done", range(6))
def test_data_without_a_length_is_shared_out_and_goes_on_anywhere(done: int) -> None:
    both = []
    for rank in (0, 1):
        whole = stream_of(Stream(22), rank, ranks=2)
        assert whole.per_epoch is None
        read = [next(whole).tolist() for _ in range(6)]
        assert read == [*read[:2]] * 3  # two whole batches of eight in each epoch
        both += read[0] + read[1]
        whole = stream_of(Stream(22), rank, ranks=2)
        for _ in range(done):
            next(whole)
        opened = stream_of(Stream(22), rank, ranks=2, at=whole.position())
        assert [next(opened).tolist() for _ in range(4)] == [next(whole).tolist() for _ in range(4)]
    assert sorted(both) == list(range(16))


class Mixed(Stream):
    """Draws its order from the process's generators, as a shuffle buffer does."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length).tolist()
        for _ in range(self.length):
            yield order.pop(random.randrange(len(order)) - numpy.random.randint(len(order)))


@pytest.mark.parametrize("done", range(4))
def test_an_order_drawn_at_random_is_that_of_every_rank_and_of_a_resumed_run(done: int) -> None:
    both = []
    for rank in (0, 1):
        seed_everything(done, rank)
        drawn = Drawn()[0]
        seed_everything(done, rank)
        data = Mixed(22)
        whole = stream_of(data, rank, ranks=2)
        read = [next(whole).tolist() for _ in range(4)]
        assert read[:2] != read[2:] and data.epoch == 1
        both += read[0] + read[1]
        at = {"step": done, "epoch": done // 2, "samples": done % 2 * 8}
        opened = stream_of(data, rank, ranks=2, at=at)
        assert [next(opened).tolist() for _ in range(4 - done)] == read[done:]
        assert Drawn()[0] == drawn  # the training's own random numbers do not change
    assert len({*both}) == 16


def test_reading_again_what_was_trained_on_counts_as_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beats: list[int] = []
    monkeypatch.setattr(batches, "beat", lambda: beats.append(1))
    next(stream_of(Stream(100), at={"step": 20, "epoch": 0, "samples": 80}))
    assert len(beats) == 21


def test_data_that_fills_no_batch_is_refused() -> None:
    with pytest.raises(SettingsError, match="too small for one batch of 4 per rank"):
        stream_of(TensorDataset(torch.arange(3)))
    with pytest.raises(SettingsError, match="epoch 0 is too small for one batch per rank"):
        next(stream_of(Stream(3)))


class Loading(Given):
    """Reads its data itself, in its own loader."""

    def loader(
        self, batch_size: int, *, rank: int, world_size: int, epoch: int, skip: int
    ) -> Iterator[str]:
        return (f"{epoch}.{n} {rank}/{world_size} x {batch_size}" for n in range(skip, 3))


def test_a_task_may_load_its_data_itself() -> None:
    stream = stream_of(Loading(None), 1, ranks=2)
    read = [next(stream) for _ in range(5)]
    assert read == [f"{n // 3}.{n % 3} 1/2 x 4" for n in range(5)]
    assert stream.position() == {"epoch": 1, "samples": 16}
    assert next(stream_of(Loading(None), 1, ranks=2, at=stream.position())) == "1.2 1/2 x 4"


def test_a_batch_is_made_by_the_tasks_own_function() -> None:
    task = Given(list(range(8)))
    task.collate = sorted
    stream = stream_of(task)
    first, second = next(stream), next(stream)
    assert first == sorted(first) and sorted([*first, *second]) == list(range(8))


def test_a_text_that_becomes_shorter_while_it_is_encoded_is_named(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("abc")
    with pytest.raises(SettingsError, match=r"a\.txt has become shorter; start again"):
        list(encode(Piece(text, 0, 10), Tokenizer("bytes")))
