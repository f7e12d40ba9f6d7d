"""What a run can be refused for, and the exit code of a run that stopped after saving."""

from __future__ import annotations

from typing import TypeVar

STOPPED = 75  # exit code of a rank, or a run, that saved a checkpoint and stopped on request


class Refused(Exception):
    """The run cannot start: `str()` is one line with the cause, the cure and the fault's name."""

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(f"{message} [{fault}]")
        self.fault = fault


E = TypeVar("E", bound=Exception)


def with_fault(kind: type[E], fault: str, message: str) -> E:
    """Return an error of a kind, with the name of its fault as `error.fault` and in its text."""
    error = kind(f"{message} [{fault}]")
    error.fault = fault  # type: ignore[attr-defined]
    return error
