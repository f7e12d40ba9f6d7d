"""Helpers for messages and settings, and the streams that messages are written to."""

from __future__ import annotations

import io
import os
import socket
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TextIO

Environ = Mapping[str, str]  # this process's variables, or a test's
OwnEnviron = MutableMapping[str, str]  # the same, to be changed for processes that it starts


class PlanError(ValueError):
    """The arguments, environment or scheduler do not describe a valid run: `cause; cure`."""


class _Stream(io.FileIO):
    """stdout or stderr that never raises: a full disk or a closed pipe must not end the run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def mend_streams() -> None:
    """Make stdin, stdout and stderr usable even if the caller closed them or the disk is full."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)  # None: it was closed
        encoding, errors = (old.encoding, old.errors) if old else ("utf-8", "replace")
        errors = errors.replace("strict", "backslashreplace")  # names may not be UTF-8
        raw = _Stream(number, "wb", closefd=False)
        new = io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=True)
        setattr(sys, name, new)


def warn(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr)


def has_colour(out: TextIO) -> bool:
    return out.isatty() and "NO_COLOR" not in os.environ


def print_row(label: str, text: str, out: TextIO | None = None) -> None:
    """Print one of the rows that a user sees before and after a run."""
    out = out or sys.stderr
    start, end = ("\x1b[1m", "\x1b[0m") if has_colour(out) else ("", "")
    print(f"{start}{label:<9}{end}  {text}", file=out, flush=True)


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: 1 rank, 2 ranks."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return sorted ranks as a person names them: "rank 3", "ranks 0-2, 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    named = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {named}"


def install_command(packages: str) -> str:
    """Return the command that installs packages for this Python."""
    words = f"{sys.executable} -m pip install"
    # uv makes environments without pip. importlib.util.find_spec would also use setuptools' finder,
    # which mistakes this for a start of pip, and breaks torch.compile in processes forked later.
    if PathFinder.find_spec("pip") is None:
        words = f"uv pip install --python {sys.executable}"
    return f"{words} {packages}"


def environment_cure(packages: str) -> str:
    """Return what to do if this Python lacks packages; pip and make init install no Makefile."""
    root = Path(__file__).resolve().parents[1]
    has_own = sys.prefix != sys.base_prefix or os.path.isdir(f"{sys.prefix}/conda-meta")
    command = install_command(packages)
    if not has_own and (root / "Makefile").exists():
        command = f"make -C {root} setup"
    return f"set PYTHON to a Python that has it, or run {command}"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return "did you mean X? " with the most similar name; "" if none is similar."""
    from difflib import get_close_matches  # not at the top: the node agent does not need it

    # With their dashes or endings, any two options or files would be similar.
    plain = {_without_ending(name): name for name in names}
    near = get_close_matches(_without_ending(word), plain, 1)
    return f"did you mean {plain[near[0]]}? " if near else ""


def _without_ending(name: str) -> str:
    return name.lstrip("-").removesuffix(".yaml").removesuffix(".yml")


def short_host_name() -> str:
    """Return this machine's name without its domain."""
    return socket.gethostname().partition(".")[0]
