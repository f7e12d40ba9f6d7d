"""Exit codes, and errors that name their fault or the wrong value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# A run exits with 0 on success, otherwise with the code of the rank that failed first, or with:
BAD_INPUT = 2  # the arguments, the config or the environment are wrong; nothing was started
REFUSED = 3  # a machine cannot take part; nothing was started
STOPPED = 75  # the run saved and stopped on request; its ranks exit with 75 too
CANNOT_START = 127  # a program or a folder does not exist, as in a shell


class Refused(Exception):
    """The run cannot start: `str()` is one line with the cause, the fix and the fault's name."""

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(f"{message} [{fault}]")
        self.fault = fault
        self.message = message


class Leave(SystemExit):
    """Ends a program that has printed the cause; `str()` is the cause, `fault` the fault's name."""

    def __init__(self, code: int, fault: str, cause: str) -> None:
        super().__init__(code)
        self.fault = fault
        self.cause = cause

    def __str__(self) -> str:
        return self.cause


def some_of(found: Sequence[object], most: int, between: str = ", ") -> str:
    """Return a list as text; of one longer than `most`, only the beginning and "..."."""
    shown = [str(one) for one in found[:most]]
    if len(found) > most:
        shown.append("...")
    return between.join(shown)


def with_fault(kind: type[Exception], fault: str, message: str) -> Exception:
    """Return an error of type `kind` with the fault's name in `error.fault` and in its text."""
    error = kind(f"{message} [{fault}]")
    error.fault = fault  # type: ignore[attr-defined]
    return error


def as_number(what: str, value: Any) -> float:
    """Return a number, or the only element of a tensor or an array.

    Raises a TypeError that begins with `what` for any other value.
    """
    try:
        number = value.item() if hasattr(value, "item") else value
        return float(+number)  # text, which float() would read, has no sign
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{what} is {value!r:.60}; pass a number, or a tensor with one element"
        ) from None
