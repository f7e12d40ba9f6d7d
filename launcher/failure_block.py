"""The failure block and the stopped line: what a user sees last, whichever program prints it.

That program keeps it in the run's folder, too, for those whose terminal is closed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from distributed.environment import printable
from distributed.errors import STOPPED
from launcher.failure import Failure, signal_name
from launcher.record.run_json import KEPT
from launcher.text import count

LONGEST_ROW = 1 << 20  # characters: a command can be long
TAIL_BYTES = 1 << 17  # of a log, to find the block that ends it
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
# A block, a stopped line, or the first row of a plan: after that, another run begins.
_ENDS = re.compile(
    r"^(?P<end>FAILED   .*\n(?:.*\n){1,99}?see      TROUBLESHOOTING.*"
    r"|stopped  .* \(code \d+\); nothing is left running(?:\nresume   .*)?)$"
    r"|^run         \S",
    re.MULTILINE,
)


@dataclass(frozen=True)
class RunSummary:
    """What the block shows besides the failure itself."""

    started: float  # seconds since the epoch
    lost_peer: int  # ranks that ended as a consequence
    stopped: int  # ranks that the launcher stopped
    left: int  # processes that could not be ended
    run_id: str
    command: str  # that resumes it, as typed, quoted for a shell; empty where nothing does
    ends: str = ""  # of a run that was stopped: by what, and how its ranks ended
    signum: int = 0  # of a run that was stopped: the first signal


@dataclass(frozen=True)
class End:
    """How a node's part of the run ended, for a launcher on another machine."""

    code: int
    failure: Failure | None
    summary: RunSummary
    is_told: bool  # node rank 0 decided it, told this node, and sends the same itself


def print_end(end: End, out: TextIO, folder: Path | None) -> None:
    """Print what a user sees last: the failure block, the stopped line, or nothing for code 0.

    It is kept in the run's folder, too, if that can be written.
    """
    kept = io.StringIO()
    for stream in (out, kept):
        if end.failure is not None:
            print_block(end.failure, end.summary, stream)
        elif end.code != 0:
            print_stop(end.code, end.summary, stream)
    if folder is not None and end.code != 0:
        with contextlib.suppress(OSError):
            new = folder / f".{KEPT}.{os.getpid()}"
            new.write_text(kept.getvalue(), encoding="utf-8")
            new.replace(folder / KEPT)


def find_end(log: Path) -> str:
    """Return the block or the stopped line that ends a log; "" if none does. Raises OSError."""
    with log.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - TAIL_BYTES))
        text = opened.read().decode(errors="replace").replace("\r\n", "\n")
    ends = [found["end"] or "" for found in _ENDS.finditer(_COLOURS.sub("", text))]
    return "\n".join(printable(row, LONGEST_ROW) for row in (ends or [""])[-1].split("\n"))


def find_kept(folder: Path) -> str:
    """Return the block or the stopped line in a run's folder; "" if there is none."""
    with contextlib.suppress(OSError):
        return find_end(folder / KEPT)
    return ""


def print_block(failure: Failure, summary: RunSummary, out: TextIO) -> None:
    """Print the failure block, the last thing a user sees of a failed run."""
    after = f"{failure.time - summary.started:.0f} s after the start"
    at_step = f", at step {failure.step}" if failure.step >= 0 else ""
    from_step = f"     (from step {failure.saved_step})" if failure.saved_step >= 0 else ""
    by_signal = f" ({signal_name(failure.code)})" if signal_name(failure.code) else ""
    rows = [
        ("FAILED", f"{failure.who} {after}{at_step}       [{failure.fault}]"),
        ("cause", failure.cause),
        *(("", frame) for frame in failure.frames),
        *(("stacks", line) for line in failure.stacks),
        ("code", f"{failure.code}{by_signal}"),
        ("others", _others(summary, failure.fault)),
        ("log", failure.log),
        ("resume", summary.command and f"RUN_ID={summary.run_id} {summary.command}{from_step}"),
        ("see", f"TROUBLESHOOTING.md#{failure.fault}"),
    ]
    colour = out.isatty() and "NO_COLOR" not in os.environ
    for name, text in rows:
        label = f"{name:<8}"
        if colour and name == "FAILED":
            label = f"\x1b[1;31m{label}\x1b[0m"
        if text:
            print(label, printable(text, LONGEST_ROW), file=out, flush=True)


def print_stop(code: int, summary: RunSummary, out: TextIO) -> None:
    """Print the line for a run that was stopped on request."""
    how = summary.ends or f"by {signal_name(code)}"
    if code == STOPPED:
        by = f"by {signal.Signals(summary.signum).name} " if summary.signum else ""
        how = f"{by}after saving a checkpoint"
    print(f"stopped  {how} (code {code}); nothing is left running", file=out, flush=True)
    print_resume(summary, out)


def print_resume(summary: RunSummary, out: TextIO) -> None:
    if summary.command:
        print(f"resume   RUN_ID={summary.run_id} {summary.command}", file=out, flush=True)


def _others(summary: RunSummary, fault: str) -> str:
    parts = []
    if summary.lost_peer:
        its = "its connection" if summary.lost_peer == 1 else "their connections"
        parts.append(f"{count(summary.lost_peer, 'rank')} lost {its} to a peer (a consequence)")
    if summary.stopped:
        were = "was" if summary.stopped == 1 else "were"
        parts.append(f"{count(summary.stopped, 'rank')} {were} stopped by the launcher")
    left = "nothing is left running"
    if fault in ("link-lost", "node-lost"):
        left += " where a node can be reached"
    if summary.left:
        left = f"{count(summary.left, 'process', 'processes')} could not be ended"
    return f"{', '.join(parts)}; {left}" if parts else left
