"""The failure block and the stopped line: what a user sees last, whichever program prints it.

That program also keeps the text in the run's folder, in case the terminal is closed.
"""

import contextlib
import io
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TextIO

from distributed.environment import printable
from distributed.errors import STOPPED
from launcher.failure import Failure, signal_name
from launcher.outcome import Outcome
from launcher.record.run_json import KEPT, read, update
from launcher.text import LONGEST_ROW, count, has_colour, name_groups, open_own

MOST_STACKS = 20  # rows
TAIL_BYTES = 1 << 20  # read from the end of a log, to find its block
COLOURS = re.compile(r"\x1b\[[\d;]*m")
FIRST_ROW = r"run {8}\S"  # of a plan, as print_row() prints it
# A block or a stopped line; or the beginning of a later start: the first row of a plan, or a line
# that refuses the start.
_ENDS = re.compile(
    r"^(?P<end>FAILED   .*\n(?:.*\n){1,99}?see      TROUBLESHOOTING.*"
    r"|stopped  .* \(code \d+\); nothing is left running(?:\nresume   .*)?)$"
    rf"|^{FIRST_ROW}"
    r"|^(?:node agent|[\w.-]+): (?!warning: ).* \[[a-z-]+\]$",
    re.MULTILINE,
)


def print_outcome(outcome: Outcome, out: TextIO, folder: Path | None) -> None:
    """Print what a user sees last: the failure block, the stopped line, or nothing.

    The text is also kept in the run's folder, and the cause in its run.json, if that is writable.
    """
    if not outcome.has_text:
        return

    kept = io.StringIO()
    for stream in (out, kept):
        if outcome.failure:
            print_block(outcome, outcome.failure, stream)
        else:
            print_stop(outcome, stream)

    if folder:
        with contextlib.suppress(OSError):
            _keep(kept.getvalue(), outcome.failure, folder)


def _keep(text: str, failure: Failure | None, folder: Path) -> None:
    """Write what was printed to the run's folder, and the cause to run.json. Raises OSError."""
    new = folder / f".{KEPT}.{os.getpid()}"
    with open_own(new, "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(folder / KEPT)
    if failure and read(folder):
        update(folder, fault=failure.fault, cause=failure.cause)


def find_end(log: Path, strip: Callable[[str], str] = str) -> str:
    """Return the block or the stopped line that ends a log; "" if none does. Raises OSError.

    `strip` removes the prefix that another program has put before a line.
    """
    text = read_tail(log, TAIL_BYTES).replace("\r\n", "\n")
    rows = "\n".join(map(strip, COLOURS.sub("", text).split("\n")))
    end = ""
    for match in _ENDS.finditer(rows):
        end = match["end"] or ""  # "": a later start has begun
    return "\n".join(printable(row, LONGEST_ROW) for row in end.split("\n"))


def read_tail(file: Path, size: int, opener: Callable[..., IO[Any]] = open) -> str:
    """Return the last `size` bytes of a file as text; U+FFFD if not UTF-8. Raises OSError."""
    with opener(file, "rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - size))
        return str(opened.read(), errors="replace")


def find_kept(folder: Path) -> str:
    """Return the block or the stopped line in a run's folder; "" if there is none."""
    with contextlib.suppress(OSError):
        rows = read_tail(folder / KEPT, TAIL_BYTES, open_own).splitlines()
        return "\n".join(printable(row, LONGEST_ROW) for row in rows)
    return ""


def print_block(outcome: Outcome, failure: Failure, out: TextIO) -> None:
    """Print the failure block, the last thing a user sees of a failed run."""
    after = f"{failure.time - outcome.started:.0f} s after the start"
    at_step = f", at step {failure.step}" if failure.step >= 0 else ""
    from_step = f"(from step {failure.saved_step})" if failure.saved_step >= 0 else ""
    by_signal = f" ({signal_name(failure.code)})" if signal_name(failure.code) else ""
    rows = [
        ("FAILED", f"{failure.who} {after}{at_step}       [{failure.fault}]"),
        ("cause", failure.cause),
        *(("", frame) for frame in failure.frames),
        *(("stacks", line) for line in _stacks(failure)),
        ("code", f"{failure.code}{by_signal}"),
        ("others", _others(outcome, failure.fault)),
        ("log", failure.log),
        ("resume", outcome.command and f"RUN_ID={outcome.run_id} {outcome.command}"),
        ("", from_step if outcome.command else ""),
        ("see", f"TROUBLESHOOTING.md#{failure.fault}"),
    ]

    for name, text in rows:
        label = f"{name:<8}"
        if name == "FAILED" and has_colour(out):
            label = f"\x1b[1;31m{label}\x1b[0m"
        if text:
            print(label, printable(text, LONGEST_ROW), file=out, flush=True)


def _stacks(failure: Failure) -> list[str]:
    """Return where the ranks were, as name_groups() does; of many lines, the first and the last."""
    lines = name_groups(failure.stacks)
    num_hidden = len(lines) - MOST_STACKS + 1  # one row says how many are hidden
    if num_hidden > 1:
        begin = MOST_STACKS // 2
        lines[begin : begin + num_hidden] = [f"... {num_hidden} more"]
    return lines


def print_stop(outcome: Outcome, out: TextIO) -> None:
    """Print the line for a run that was stopped on request, and the line that resumes it."""
    if outcome.code == STOPPED:
        by = f"by {signal.Signals(outcome.signum).name} " if outcome.signum else ""
        how = f"{by}after saving a checkpoint"
    else:
        how = outcome.ends or f"by {signal_name(outcome.code)}"
    print(f"stopped  {how} (code {outcome.code}); nothing is left running", file=out, flush=True)
    print_resume(outcome, out)


def print_resume(outcome: Outcome, out: TextIO) -> None:
    """Print the line that resumes the run, if any line does."""
    if outcome.command:
        print(f"resume   RUN_ID={outcome.run_id} {outcome.command}", file=out, flush=True)


def _others(outcome: Outcome, fault: str) -> str:
    """Return what became of the other ranks, and whether processes are left."""
    parts = []
    if outcome.lost_peer:
        its = "its connection" if outcome.lost_peer == 1 else "their connections"
        parts.append(f"{count(outcome.lost_peer, 'rank')} lost {its} to a peer (a consequence)")
    if outcome.stopped:
        were = "was" if outcome.stopped == 1 else "were"
        parts.append(f"{count(outcome.stopped, 'rank')} {were} stopped by the launcher")

    left = "nothing is left running"
    if outcome.left:
        left = f"{count(outcome.left, 'process', 'processes')} could not be ended"
    elif fault in ("link-lost", "node-lost"):
        left += " on the reachable nodes"
    return f"{', '.join(parts)}; {left}" if parts else left
