"""Convert the text in a folder to tokens; then set `data.path` to TO:

    python -m training.prepare FOLDER --to data/tokens --tokenizer tiktoken:gpt2

TO receives train.bin and val.bin, in nanoGPT's format, and tokens.json with their dtype, the size
of the vocabulary and the tokenizer (bytes, tiktoken:NAME or tokenizers:FILE).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from training.config_file import SettingsError
from training.tasks.data import FACTS, Piece, find_corpus
from training.tokenizer import Tokenizer

CHUNK = 1 << 20  # bytes of text to encode at a time
CODES = {"uint8": "B", "uint16": "H", "uint32": "I"}  # type codes of array


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m training.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="a folder of text files, or one text file")
    parser.add_argument("--to", metavar="TO", type=Path, required=True, help="a folder")
    parser.add_argument("--tokenizer", default="bytes", help="default: bytes")
    chosen = parser.parse_args(arguments)

    try:
        prepare(chosen.folder, chosen.to, Tokenizer(chosen.tokenizer))
    except (SettingsError, OSError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    return 0


def prepare(path: str, to: Path, tokenizer: Tokenizer) -> None:
    """Write the training and validation data of a text as tokens, and print how many.

    Also copies the tokenizer's file, if it has one, into `to`, and writes tokens.json. Prints the
    files that it skips. Raises SettingsError if there is no text at `path`, if `path` or `to`
    already holds tokens, or if `to` is a file.
    """
    corpus = find_corpus(path)
    if not corpus.is_text:
        raise SettingsError(f"{path} already holds tokens; name it in data.path")
    if to.is_file() or (to / "train.bin").exists():
        what = "is a file" if to.is_file() else "already has a train.bin"
        raise SettingsError(f"{to} {what}; name another folder, or delete it")

    size = tokenizer.vocabulary
    # The smallest type that has a value for each token.
    dtype = next(name for name, code in CODES.items() if size <= 256 ** array(code).itemsize)
    to.mkdir(parents=True, exist_ok=True)
    facts = {"dtype": dtype, "vocabulary": size, "tokenizer": tokenizer.name}
    if tokenizer.file:
        facts["tokenizer"] = f"tokenizers:{tokenizer.file.name}"
        if tokenizer.file.resolve().parent != to.resolve():
            shutil.copy(tokenizer.file, to)

    for name, pieces in (("val.bin", corpus.validation), ("train.bin", corpus.train)):
        count = 0
        with (to / f"{name}.new").open("wb") as opened:
            for piece in pieces:
                for tokens in encode(piece, tokenizer):
                    array(CODES[dtype], tokens).tofile(opened)
                    count += len(tokens)
        print(f"{to / name}: {count:,} tokens of {sum(piece.size for piece in pieces):,} bytes")

    (to / FACTS).write_text(json.dumps(facts) + "\n")
    # Renamed at the end, train.bin last: by its name, find_corpus() recognizes a folder of tokens.
    for name in "val.bin", "train.bin":
        (to / f"{name}.new").replace(to / name)
    for file in corpus.skipped:
        print(f"skipped {file}")


def encode(piece: Piece, tokenizer: Tokenizer) -> Iterator[Sequence[int]]:
    """Yield the tokens of a document, about CHUNK bytes of whole lines at a time.

    The last is the token between two documents, if the tokenizer has one.
    """
    with piece.path.open("rb") as opened:
        opened.seek(piece.start)
        while (left := piece.start + piece.size - opened.tell()) > 0:
            text = opened.read(min(CHUNK, left))
            if not text:
                raise SettingsError(f"{piece.path} has become shorter; start again")
            if len(text) == CHUNK:
                text += opened.readline(left - CHUNK)
            yield tokenizer.encode(text)
    if tokenizer.end is not None:
        yield [tokenizer.end]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
