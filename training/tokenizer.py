"""Tokenizers by name: bytes, tiktoken:gpt2, or tokenizers:FILE for Hugging Face's library.

Install tiktoken or tokenizers yourself if you use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.config_file import SettingsError


class Tokenizer:
    """Converts text to tokens and back."""

    def __init__(self, name: str, folder: Path = Path()) -> None:
        """Load a tokenizer by its name; `folder` contains FILE of tokenizers:FILE.

        tiktoken downloads its files when they are first used. Raises SettingsError if the library
        or a file is missing or invalid, or the name is unknown.
        """
        self.name = name
        self._kind, _, model = name.partition(":")
        self.end: int | None = None  # the token between two documents
        self.file: Path | None = None  # the file that it was read from

        if name == "bytes":
            self.vocabulary = 256
        elif self._kind == "tiktoken" and model:
            tiktoken = _import("tiktoken")
            try:
                self._tokens: Any = tiktoken.get_encoding(model)
            except (ValueError, OSError) as error:  # OSError: it cannot be fetched
                raise SettingsError(f"tokenizer {name}: {error}") from None
            self.vocabulary = self._tokens.n_vocab
            self.end = self._tokens.eot_token
        elif self._kind == "tokenizers" and model:
            self.file = folder / model
            if not self.file.is_file():
                raise SettingsError(f"tokenizer {name}: there is no file {self.file}")
            try:
                self._tokens = _import("tokenizers").Tokenizer.from_file(str(self.file))
            except Exception as error:  # its only type of error for an invalid file
                raise SettingsError(f"tokenizer {name}: {error}") from None
            self.vocabulary = self._tokens.get_vocab_size()
            self.end = self._tokens.token_to_id("<|endoftext|>")
        else:
            raise SettingsError(
                f"tokenizer {name!r} is unknown; give bytes, tiktoken:gpt2 or tokenizers:FILE"
            )

    def encode(self, text: bytes) -> Sequence[int]:
        """Return the tokens of a text."""
        if self.name == "bytes":
            return text
        readable = text.decode(errors="replace")
        if self._kind == "tiktoken":
            return list(self._tokens.encode_ordinary(readable))
        return list(self._tokens.encode(readable, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens; ignores tokens outside the vocabulary, which have no text."""
        tokens = [token for token in tokens if token < self.vocabulary]
        if self.name == "bytes":
            return bytes(tokens)
        if self._kind == "tiktoken":
            return bytes(self._tokens.decode_bytes(tokens))
        return str(self._tokens.decode(tokens)).encode()


def _import(name: str) -> Any:
    """Return a tokenizer's library; raises SettingsError if it is not installed."""
    try:
        return __import__(name)
    except ImportError:
        raise SettingsError(f"tokenizer {name} is not installed; pip install {name}") from None
