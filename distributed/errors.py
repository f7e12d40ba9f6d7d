"""Exit codes, and errors that name their fault."""

from __future__ import annotations

# A run exits with 0 when it is done, and otherwise with the code of the rank that failed first, or:
BAD_INPUT = 2  # the arguments, the config or the environment are wrong; nothing was started
REFUSED = 3  # a machine cannot take the run; nothing was started
STOPPED = 75  # it saved a checkpoint and stopped on request; so does a rank
CANNOT_START = 127  # a program or a folder is not there, as in a shell


class Refused(Exception):
    """The run cannot start: `str()` is one line with the cause, the cure and the fault's name."""

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(f"{message} [{fault}]")
        self.fault, self.message = fault, message


class Leave(SystemExit):
    """The end of a program that has printed why: `str()` is the cause, `fault` its name."""

    def __init__(self, code: int, fault: str, cause: str) -> None:
        super().__init__(code)
        self.fault, self.cause = fault, cause

    def __str__(self) -> str:
        return self.cause


def with_fault(kind: type[Exception], fault: str, message: str) -> Exception:
    """Return an error of a kind, with the name of its fault as `error.fault` and in its text."""
    error = kind(f"{message} [{fault}]")
    error.fault = fault  # type: ignore[attr-defined]
    return error
