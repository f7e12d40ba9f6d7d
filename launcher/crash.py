"""Why native code ended a rank, from the last lines that the rank wrote (no torch)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from launcher.explain.rules import find_rule
from launcher.failure import CRASHED, RaisedError, explain, is_foreign, match_frame, signal_name

# Of the C++ exception that nothing caught, or why there is none: as if no thread could start.
_WHAT = re.compile(r"^(?: +what\(\): +|(?=terminate called without))(?P<text>\S.*)")
_FATAL = "Fatal Python error"
_MISMATCH = "collective-mismatch"
# Functions of torch that stand between a collective's name and the script.
_WRAPPERS = ("wrapper", "inner", "decorate_context", "_fn")


def read_crash(lines: Sequence[str], code: int, time: float) -> RaisedError | None:
    """Return what a rank's last lines show about the signal that ended it.

    They are its C++ exception, if there was one, and the Python stack that faulthandler wrote.
    Returns None if they have neither, or if the exit code is not that of a crash.
    """
    fault, meaning = explain(code, out_of_memory=False)
    if fault != CRASHED:
        return None

    fatal = _find_last(lines, lambda line: line.startswith(_FATAL))
    what = _find_last(lines, _WHAT.match)
    stack = _python_stack(lines[fatal:]) if fatal >= 0 else []
    outermost_first = "\n".join(reversed(stack))
    if what < 0:
        return RaisedError(meaning, outermost_first, code, time, fault)

    end = fatal if fatal > what else len(lines)
    said = [_WHAT.sub(r"\g<text>", lines[what]), *lines[what + 1 : end]]
    rule = find_rule("\n".join(said))
    fault = rule.fault if rule else fault
    message = "\n".join([f"{signal_name(code)}: {said[0]}", *said[1:]])
    details = []
    if fault == _MISMATCH:
        message = _explain_mismatch(stack)
        details = said[:1]
    return RaisedError(message, outermost_first, code, time, fault, details=details)


def _find_last(lines: Sequence[str], is_it: Callable[[str], object]) -> int:
    """Return the index of the last line that `is_it` accepts; -1 if there is none."""
    return next((at for at in reversed(range(len(lines))) if is_it(lines[at])), -1)


def _python_stack(lines: Sequence[str]) -> list[str]:
    """Return the frames of the main thread, which faulthandler writes last, innermost first."""
    begin = _find_last(lines, lambda line: "most recent call first" in line)
    return [line for line in lines[begin:] if match_frame(line)] if begin >= 0 else []


def _explain_mismatch(stack: Sequence[str]) -> str:
    """Return a cause that names the function that the script called last."""
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
