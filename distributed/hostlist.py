"""SLURM's host lists: `rack[1-2]n[01-03],login` names seven hosts.

    python -m distributed.hostlist expand LIST    every name, one a line
    python -m distributed.hostlist first LIST     the first name

As `scontrol show hostnames` reads them: order and duplicates are kept, the zeros of a range's first
number give its width, and of several brackets the last runs fastest. More than it: a suffix may
follow a bracket, a range may be of any length, and what cannot be read is always an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator

# Up to a comma or blank outside brackets; and the bracket without a partner that ends it, if any.
_ITEM = re.compile(r"(?=[^,\s])((?:[^\[\],\s]|\[[^\[\]]*\])*)([\[\]]?)")
_PART = re.compile(r"\[([^\]]*)\]|[^\[]+")  # a bracket or the text between two
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


class HostlistError(ValueError):
    """A host list that cannot be read; the message names the item and its position."""


class _Numbers:
    """The numbers in one pair of brackets, as text; made anew each time they are asked for."""

    def __init__(self, text: str) -> None:
        self.ranges: list[tuple[int, int, int]] = []  # first, last, width
        for item in text.split(","):
            match = _RANGE.fullmatch(item.strip())
            if match is None:
                raise ValueError(f"{item.strip()!r} is neither a number nor a range")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise ValueError(f"{item.strip()!r} runs backwards")
            self.ranges.append((first, last, len(match[1])))

    def __iter__(self) -> Iterator[str]:
        for first, last, width in self.ranges:
            for number in range(first, last + 1):
                yield str(number).zfill(width)


def expand(text: str) -> list[str]:
    """Return every host name in order, duplicates included; raises HostlistError."""
    return list(_names(text))


def first(text: str) -> str:
    """Return the first name and read no further, so that a long list costs nothing.

    Raises HostlistError where the list is empty or its first item cannot be read.
    """
    return next(_names(text))


def _names(text: str) -> Iterator[str]:
    match = None
    for match in _ITEM.finditer(text):
        item, stray = match.groups()
        if stray:
            raise _error(text, match.start(2), f"{stray!r} has no partner")
        try:
            names = _product(item)
        except ValueError as error:
            raise _error(text, match.start(), str(error)) from None
        yield from names
    if match is None:
        raise HostlistError("host list is empty")


def _product(item: str) -> Iterator[str]:
    """Yield the names of one item, the last bracket fastest."""
    names: Iterator[str] = iter(("",))
    for match in _PART.finditer(item):
        names = _each_with(names, (match[0],) if match[1] is None else _Numbers(match[1]))
    return names


def _each_with(heads: Iterator[str], tails: Iterable[str]) -> Iterator[str]:
    return (head + tail for head in heads for tail in tails)


def _error(text: str, position: int, problem: str) -> HostlistError:
    nearby = text[max(0, position - 20) : position + 40]
    return HostlistError(f"host list {nearby!r}: {problem}, at position {position + 1}")


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["expand", text]:
                print("\n".join(expand(text)))
            case ["first", text]:
                print(first(text))
            case _:
                print("usage: python -m distributed.hostlist expand|first LIST", file=sys.stderr)
                return 2
    except HostlistError as error:
        print(f"hostlist: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
