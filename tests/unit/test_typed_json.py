"""Messages: what is sent arrives as it was, and anything else is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.typed_json import MessageError, decode, encode


@dataclass(frozen=True)
class Inner:
    name: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Outer:
    number: int
    is_set: bool
    path: Path
    inner: Inner | None = None
    words: Sequence[str] = ()
    all: Sequence[Inner] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


SMALL = {"number": 1, "is_set": True, "path": "/a"}


def test_what_is_sent_arrives() -> None:
    sent = Outer(1, False, Path("/a b"), Inner("x", 1.5), ["é\n", ""], [Inner("y")], {"a": "b"})
    assert "\n" not in encode(sent)
    assert decode(Outer, json.loads(encode(sent))) == sent


def test_defaults_and_whole_numbers() -> None:
    assert decode(Outer, SMALL) == Outer(1, True, Path("/a"))
    assert decode(Inner, {"name": "x", "seconds": 2}) == Inner("x", 2.0)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {**SMALL, "number": True},
        {**SMALL, "number": 1.0},
        {**SMALL, "is_set": 1},
        {**SMALL, "path": 1},
        {**SMALL, "unknown": 1},
        {**SMALL, "inner": {"name": "x", "seconds": float("nan")}},
        {**SMALL, "inner": {"name": "x", "seconds": 10**400}},
        {**SMALL, "inner": {"name": "x", "seconds": False}},
        {**SMALL, "words": "text"},
        {**SMALL, "words": [1]},
        {**SMALL, "versions": {"a": 1}},
        {**SMALL, "all": [{"name": "x"}, 7]},
    ],
)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(MessageError):
        decode(Outer, value)
