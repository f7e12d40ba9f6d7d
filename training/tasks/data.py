"""The data of the built-in task: text or tokens, read from files where they are.

    FOLDER    text: all files below it, apart from binary files, which are reported, and hidden
              ones. One in sixteen is validation data, chosen by the SHA-256 of its name, so adding
              files does not reassign the others.
    FOLDER    with train.bin and val.bin: tokens, as training/prepare.py and nanoGPT write them.
    FILE      text, or tokens in FILE.bin; its last sixteenth is validation data.
    null      the sources of Python's standard library, without its tests and IDLE.

A sample is read when it is needed, so a start takes no longer with 2 GB than with 20 MB. Files are
not mapped into memory: mapped pages count as the process's memory, and if a file has since been
truncated, the process is killed without a message.
"""

from __future__ import annotations

import bisect
import fnmatch
import functools
import hashlib
import io
import itertools
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from training.config_file import SettingsError
from training.settings import data_path

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib"}  # of the library
SHARE = 16  # one in this many files or bytes is validation data
VALIDATION_TOKENS = 131_072  # the most tokens that a validation uses
OPEN_FILES = 256  # at the same time, at most
DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32}
FACTS = "tokens.json"  # beside train.bin: dtype, vocabulary, tokenizer


class Piece(NamedTuple):
    """A part of a file, in bytes."""

    path: Path
    start: int
    size: int


@dataclass(frozen=True)
class Corpus:
    """Training and validation data, and what is known about its tokens."""

    train: Sequence[Piece]
    validation: Sequence[Piece]
    name: str  # shown to the user
    folder: Path = Path()  # where its tokenizer file is
    skipped: Sequence[str] = ()  # files and folders below it that are not read, and why
    dtype: torch.dtype = torch.uint8  # of one token
    vocabulary: int = 256
    tokenizer: str = "bytes"  # see training/tokenizer.py; empty: not known

    @property
    def is_text(self) -> bool:
        """Whether a token is a byte."""
        return self.tokenizer == "bytes"


class Windows(Dataset[Tensor]):
    """Tokens cut into windows; window i is tokens i * context to (i + 1) * context inclusive.

    Neighbours share one token, the last target of one and the first input of the next, so every
    token except the first is predicted exactly once.
    """

    block = 256  # consecutive windows that are shuffled together, see training/batches.py

    def __init__(
        self, pieces: Sequence[Piece], context: int, dtype: torch.dtype, most: int = sys.maxsize
    ) -> None:
        """Use at most the first `most` tokens."""
        self.context = context
        self._dtype = dtype
        self._pieces = [piece for piece in pieces if piece.size]
        self._ends = [*itertools.accumulate(piece.size for piece in self._pieces)]
        self.size = min(most, sum(piece.size for piece in pieces) // dtype.itemsize)  # tokens

    def __len__(self) -> int:
        return max(0, self.size - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:  # [context + 1], uint8 or int64
        if index >= len(self):
            raise IndexError(index)
        tokens = torch.frombuffer(
            self.read(index * self.context, self.context + 1), dtype=self._dtype
        )
        return tokens if self._dtype == torch.uint8 else tokens.to(torch.int64)

    def read(self, first: int, count: int) -> bytearray:
        """Return the bytes of `count` tokens, from `first` on, which may be in several files.

        Raises OSError if a file is now shorter.
        """
        at = first * self._dtype.itemsize
        missing = count * self._dtype.itemsize
        found = bytearray()

        for number in range(bisect.bisect_right(self._ends, at), len(self._ends)):
            piece = self._pieces[number]
            offset = at + len(found) - (self._ends[number] - piece.size)
            size = min(missing - len(found), piece.size - offset)

            read = os.pread(_open(piece.path).fileno(), size, piece.start + offset)
            if len(read) < size:
                raise OSError(f"{piece.path} is shorter than when the run started; restore it")
            found += read
            if len(found) == missing:
                break

        return found

    def largest(self) -> int:
        """Return the largest token."""
        return int(torch.frombuffer(self.read(0, self.size), dtype=self._dtype).long().max())


# Python closes a file when it leaves this cache, and nothing else uses it.
_open = functools.lru_cache(OPEN_FILES)(io.FileIO)


def find_corpus(path: str | None) -> Corpus:
    """Find the data at `data.path`; its tokens are read later.

    Raises SettingsError if it is missing, has fewer than two text files, or a train.bin but no
    val.bin, or if its tokens.json is invalid.
    """
    found = data_path(path)
    if found and (found / "train.bin").is_file():
        if not (found / "val.bin").is_file():
            raise SettingsError(f"data.path: {found} has a train.bin but no val.bin; add it")
        files = found / "train.bin", found / "val.bin"
        sides = [[Piece(file, 0, file.stat().st_size)] for file in files]
        return _read_facts(found, found / FACTS, *sides)

    if found and found.is_file():
        size = found.stat().st_size
        start = size - size // SHARE // 8 * 8  # at a token boundary, whatever the size of a token
        sides = [[Piece(found, 0, start)], [Piece(found, start, size - start)]]
        if found.suffix == ".bin":
            return _read_facts(found, found.with_name(FACTS), *sides)
        return Corpus(sides[0], sides[1], name=str(found))

    return _find_text(found)


def _read_facts(name: Path, facts: Path, train: list[Piece], validation: list[Piece]) -> Corpus:
    """Return a corpus of these tokens, with what the file `facts` says of them, if it exists.

    Raises SettingsError if the file is damaged, or has an unknown dtype.
    """
    try:
        found = dict(json.loads(facts.read_text())) if facts.is_file() else {}
    except (ValueError, TypeError):
        raise SettingsError(f"data.path: {facts} is damaged; prepare the tokens again") from None

    kind = found.get("dtype", "uint16")  # as in nanoGPT's files
    if kind not in DTYPES:
        raise SettingsError(f"data.path: {facts}: dtype {kind!r} is not one of {', '.join(DTYPES)}")
    return Corpus(
        train=train,
        validation=validation,
        name=str(name),
        folder=facts.parent,
        dtype=DTYPES[kind],
        vocabulary=found.get("vocabulary", 0),
        tokenizer=found.get("tokenizer", ""),
    )


def visible_files(
    folder: Path | None, on_error: Callable[[OSError], None]
) -> list[tuple[bytes, Path]]:
    """Return (SHA-256 of the name, path) of each file, sorted by hash: a fixed shuffle.

    These are all files below the folder, text or not, that are neither hidden nor in a hidden
    folder; without a folder, the standard library's *.py files. `on_error` is called with the error
    of each folder that cannot be read.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    left_out = () if folder else SKIPPED_FOLDERS
    found = []

    for parent, folders, names in os.walk(root, onerror=on_error):
        folders[:] = [one for one in folders if one not in left_out and not one.startswith(".")]
        for name in fnmatch.filter(names, "[!.]*" if folder else "[!.]*.py"):
            path = Path(parent, name)
            if path.is_file():
                digest = hashlib.sha256(os.fsencode(path.relative_to(root))).digest()
                found.append((digest, path))
    return sorted(found)


def _find_text(folder: Path | None) -> Corpus:
    """Return a folder's text files or, without a folder, those of the standard library.

    A NUL byte in the first 4 KB means that a file is not text. `skipped` lists such files, and
    those that cannot be read, but not hidden ones. Raises SettingsError if there are fewer than two
    text files.
    """
    train = list[Piece]()
    validation = list[Piece]()
    skipped = []

    def skip_unreadable(error: OSError) -> None:
        skipped.append(f"{Path(error.filename).name} ({error.strerror})")

    for digest, path in visible_files(folder, skip_unreadable):
        side = validation if digest[-1] < 256 // SHARE else train  # one file in SHARE, on average
        try:
            with path.open("rb") as opened:
                if b"\0" in opened.read(4096):
                    skipped.append(f"{path.name} (not text)")
                else:
                    side.append(Piece(path, 0, os.fstat(opened.fileno()).st_size))
        except OSError as error:
            skip_unreadable(error)

    if len(train) + len(validation) < 2:
        raise SettingsError(
            f"data.path: {folder} holds fewer than two text files; "
            "add files, or give one file, which is split by position"
        )
    # With few files, all can be on one side.
    if not train:
        train.append(validation.pop(0))
    if not validation:
        validation.append(train.pop(0))
    return Corpus(train, validation, str(folder or "the standard library"), skipped=skipped)
