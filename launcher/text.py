"""Small pieces of what a user reads: a row of the plan, a number with its noun, a host's name."""

from __future__ import annotations

import os
import socket
import sys
from typing import TextIO


def print_row(label: str, text: str, out: TextIO | None = None) -> None:
    """Print one row of what a user sees before and after a run."""
    out = out or sys.stderr
    is_bold = out.isatty() and not os.environ.get("NO_COLOR")
    start, end = ("\x1b[1m", "\x1b[0m") if is_bold else ("", "")
    print(f"{start}{label:<9}{end}  {text}", file=out, flush=True)


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: 1 rank, 2 ranks."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def short_host_name() -> str:
    """Return this machine's name without its domain."""
    return socket.gethostname().partition(".")[0]
