"""Dataclasses as JSON, between programs: the receiver rejects whatever does not fit the type.

text = encode(report)
report = parse(Report, text)
"""

import json
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
MAX_FLOAT = sys.float_info.max


def in_pieces(text: str, size: int) -> list[str]:
    """Return a text in pieces of `size` characters, the last of which may be shorter."""
    return [text[at : at + size] for at in range(0, len(text), size)]


class MessageError(ValueError):
    """A message does not fit its type; the text names the field."""


def encode(message: Any) -> str:
    """Return a dataclass as one line of JSON."""
    return json.dumps(message, default=_plain, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Return what JSON can hold; dataclasses.asdict is 10 times slower, because it copies."""
    return vars(value) if is_dataclass(value) else str(value)


def parse(kind: type[T], text: bytes | str) -> T:
    """Return the dataclass that a JSON text describes. Raises MessageError."""
    return decode(kind, parse_json(text))


def parse_json(text: bytes | str) -> Any:
    """Return the content of a JSON text. Raises MessageError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise MessageError(f"not JSON: {text!r:.80}") from None


def decode(kind: type[T], value: Any) -> T:
    """Return the dataclass that a JSON object describes, with every field checked.

    Fields may be of type str, int, float, bool, Path, another dataclass, a Sequence or a tuple of
    one of these, a Mapping from str, or a union of one of these with None. Missing fields get their
    defaults. Raises MessageError if a field without a default is missing, or if a field is unknown
    or of the wrong type.
    """
    result: T = _read(kind, value, kind.__name__)
    return result


_hints = cache(get_type_hints)


def _read(kind: Any, value: Any, where: str) -> Any:
    """Return a value of JSON as a `kind`. Raises MessageError, which names it as `where`."""
    # Most values. The exact type, because True is an int; a float must also be finite.
    if type(value) is kind and kind is not float:
        return value
    if is_dataclass(kind):
        return _read_dataclass(kind, value, where)

    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (other,) = (item for item in arguments if item is not type(None))
        return _read(other, value, where)

    if origin in (tuple, Sequence) and isinstance(value, list):
        items = [_read(arguments[0], item, f"{where}[{n}]") for n, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is Mapping and isinstance(value, dict):
        return {name: _read(arguments[1], item, f"{where}.{name}") for name, item in value.items()}

    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) in (int, float):
        if not -MAX_FLOAT <= value <= MAX_FLOAT:  # json accepts NaN and 1e999
            raise MessageError(f"{where}: {value!r:.80} is not a finite number")
        return float(value)
    raise MessageError(f"{where}: {value!r:.80} is not of type {kind}")


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    """Return the dataclass `kind` that a JSON object describes, as _read() does."""
    hints = _hints(kind)
    if not isinstance(value, dict) or not value.keys() <= hints.keys():
        raise MessageError(f"{where}: {value!r:.80} is not a {kind.__name__}")
    read = {name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()}
    try:
        return kind(**read)
    except (TypeError, ValueError) as error:  # a field is missing, or the type rejects its value
        raise MessageError(f"{where}: {error}") from None
