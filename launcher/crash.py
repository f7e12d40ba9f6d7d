"""Why native code ended a rank, from the last lines that the rank wrote (no torch)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from launcher.explain.rules import find_rule
from launcher.failure import (
    CRASHED,
    RaisedError,
    explain_exit,
    is_foreign,
    match_frame,
    signal_name,
)

# What an uncaught C++ exception says, or that C++ ended the process without an exception.
_WHAT = re.compile(r"^(?: +what\(\): +|(?=terminate called without))(?P<text>\S.*)")
_FATAL = "Fatal Python error"
_MISMATCH = "collective-mismatch"
# Functions of torch that stand between a collective's name and the script.
_WRAPPERS = ("wrapper", "inner", "decorate_context", "_fn")


def read_crash(lines: Sequence[str], code: int, time: float) -> RaisedError | None:
    """Return what a rank's last lines show about the signal that ended it.

    That is its C++ exception, if there was one, and the Python stack, if faulthandler wrote it;
    otherwise only the meaning of the signal. An exception that a rule of explain/ knows gets the
    rule's fault; if it says that collectives do not match, the message says which of the script's
    calls that was, and the exception is in `details`. Returns None if `code` is no crash's.
    """
    fault, meaning = explain_exit(code, out_of_memory=False)
    if fault != CRASHED:
        return None

    fatal = _find_last(lines, lambda line: line.startswith(_FATAL))
    what = _find_last(lines, _WHAT.match)
    stack = _python_stack(lines[fatal:]) if fatal >= 0 else []
    crash = RaisedError(meaning, "\n".join(reversed(stack)), code, time, fault)
    if what < 0:
        return crash

    end = fatal if fatal > what else len(lines)
    exception = [_WHAT.sub(r"\g<text>", lines[what]), *lines[what + 1 : end]]
    text = "\n".join(exception)
    rule = find_rule(text)
    if rule and rule.fault == _MISMATCH:
        message = _explain_mismatch(stack)
        return replace(crash, message=message, fault=_MISMATCH, details=exception[:1])
    message = f"{signal_name(code)}: {text}"
    return replace(crash, message=message, fault=rule.fault if rule else fault)


def _find_last(lines: Sequence[str], accepts: Callable[[str], object]) -> int:
    """Return the index of the last line that `accepts` is true for; -1 if there is none."""
    for at in reversed(range(len(lines))):
        if accepts(lines[at]):
            return at
    return -1


def _python_stack(lines: Sequence[str]) -> list[str]:
    """Return the frames of the main thread, which faulthandler writes last, innermost first."""
    begin = _find_last(lines, lambda line: "most recent call first" in line)
    return [line for line in lines[begin:] if match_frame(line)]


def _explain_mismatch(stack: Sequence[str]) -> str:
    """Return a cause that names the function of torch that the script called last, if it is known.

    `stack` begins with the innermost frame.
    """
    called = ""
    for frame in filter(None, map(match_frame, stack)):
        if not is_foreign(frame["file"]):
            break
        if frame["name"] not in _WRAPPERS:
            called = frame["name"]

    if not called:
        return "the ranks called different collectives; every rank must make the same calls"
    return (
        f"the ranks called different collectives, this one {called}(); "
        f"every rank must call {called}(), with tensors of the same sizes"
    )
