"""SLURM's host lists: `rack[1-2]n[01-03],login` names seven hosts.

They expand as with `scontrol show hostnames`: order and duplicates are kept, a range's first
number sets the width, and the last of several brackets changes fastest, then the first, the
second and so on. Unlike with scontrol, a suffix can follow a bracket, a range can have any length,
and any unreadable list is an error (tests/unit/test_like_scontrol.py compares the two).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice, product
from operator import add
from typing import Any

# Text up to a comma or blank outside brackets, and the unmatched bracket that ends it, if any.
_ITEM = re.compile(r"(?=[^,\s])((?:[^\[\],\s]|\[[^\[\]]*\])*)([\[\]]?)")
_MOST_NAMES = 10**6
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


class HostlistError(ValueError):
    """A host list that cannot be read; the message names the item and its position."""


def expand(text: str) -> list[str]:
    """Return every host name in order, duplicates included.

    Raises HostlistError if the list cannot be read, or has more than a million names (a typo).
    """
    names = list(islice(_names(text), _MOST_NAMES + 1))
    if len(names) > _MOST_NAMES:
        raise HostlistError(f"host list {text[:60]!r} has more than {_MOST_NAMES} names")
    return names


def first(text: str) -> str:
    """Return the first name without reading the rest of the list.

    Raises HostlistError if the list is empty or its first item cannot be read.
    """
    return next(_names(text))


def _names(text: str) -> Iterator[str]:
    """Yield every name of a list as it is read; raises HostlistError at the first bad item."""
    match = None
    for match in _ITEM.finditer(text):
        item, stray = match.groups()
        if stray:
            raise _error(text, match.start(2), f"unmatched {stray!r}")
        try:
            yield from _expand_item(item)
        except ValueError as error:
            raise _error(text, match.start(), str(error)) from None
    if match is None:
        raise HostlistError("host list is empty")


def _expand_item(item: str) -> Iterator[str]:
    """Yield the names of one item, such as `rack[1-2]n[01-03]`; raises ValueError."""
    *parts, tail = re.split(r"\[(.*?)\]", item, flags=re.DOTALL)  # text, bracket, text, ...
    texts = parts[::2]
    brackets = [_read_bracket(one) for one in parts[1::2]]
    for numbers in product(*_slowest_first(brackets)):
        yield "".join(map(add, texts, _slowest_first(numbers))) + tail  # text, number, text, ...


def _slowest_first(brackets: Sequence[Any]) -> Sequence[Any]:
    """Return brackets in the order of their change: the last is the fastest, then the first.

    Applied to the result, it restores the order of the text.
    """
    return [*brackets[-2::-1], *brackets[-1:]]


def _read_bracket(bracket: str) -> Iterator[str]:
    """Yield the numbers of `1-3,07` as text, and no more of a range than a list may have.

    Raises ValueError if a part is not a number or a range, or if a range is reversed.
    """
    for part in map(str.strip, bracket.split(",")):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is neither a number nor a range")
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
        if not numbers:
            raise ValueError(f"the range {part!r} is reversed")
        for number in numbers[: _MOST_NAMES + 1]:
            yield f"{number:0{len(match[1])}}"


def _error(text: str, position: int, problem: str) -> HostlistError:
    """Return the error for a problem at an index of the text; it quotes what is near."""
    nearby = text[max(0, position - 20) : position + 40]
    return HostlistError(f"host list {nearby!r}: {problem}, at position {position + 1}")
