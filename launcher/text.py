"""Helpers for messages and settings, and the streams that messages are written to."""

import contextlib
import errno
import io
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from importlib.machinery import PathFinder
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, TextIO

from distributed.environment import printable

LONGEST_ROW = 1 << 20  # characters: a command can be long
MANY = 16  # names or numbers; more are folded
Environ = Mapping[str, str]  # this process's variables, or a test's
OwnEnviron = MutableMapping[str, str]  # the same, to be changed for processes that it starts
Say = Callable[[str], None]  # shows a line to the user


class PlanError(ValueError):
    """The arguments, environment or scheduler do not describe a valid run: `cause; cure [fault]`.

    Without `fault`, the text does not end with its name; main() then adds "config-invalid".
    """

    def __init__(self, text: str, fault: str = "") -> None:
        super().__init__(f"{text} [{fault}]" if fault else text)
        self.fault = fault


class Stream(io.FileIO):
    """stdout or stderr that never raises: a full disk or a closed pipe must not end the run."""

    lost = ""  # why output could not be written, except to a closed pipe, as after `| head`

    def write(self, data: Any) -> int:
        """Write data, and drop what cannot be written. Returns the bytes written or dropped."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EPIPE:
                self.lost = str(error.strerror)
            return len(data)


def mend_streams() -> Stream:
    """Make stdin, stdout and stderr usable even if the caller closed them or the disk is full.

    A closed one becomes /dev/null. Replaces sys.stdout and sys.stderr by streams that write each
    line at once. Returns stdout, without its buffer.
    """
    # If the caller closed one, another file must not get its number.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)

    for number, name in ((2, "stderr"), (1, "stdout")):
        old = getattr(sys, name)  # None: it was closed
        encoding, errors = (old.encoding, old.errors) if old else ("utf-8", "replace")
        errors = errors.replace("strict", "backslashreplace")  # names may not be UTF-8
        raw = Stream(number, "wb", closefd=False)
        new = io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=True)
        setattr(sys, name, new)
    return raw


def open_own(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file in a folder that others may write to: follow no link, wait for no pipe.

    Raises OSError if it is a link, or cannot be opened.
    """

    def opener(name: str, flags: int) -> int:
        """Return a new descriptor; of a pipe, without waiting for its other end."""
        flags |= os.O_NOFOLLOW
        try:
            return os.open(name, flags | os.O_NONBLOCK, 0o666)
        except BlockingIOError:  # an NFS client has a delegation, which is withdrawn now
            return os.open(name, flags, 0o666)

    return open(path, mode, opener=opener, **options)


def read_text(file: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text(errors="surrogateescape")
    return ""


def warn(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr)


def has_colour(out: TextIO) -> bool:
    """Whether to print in colour: on a terminal, unless NO_COLOR is set."""
    return out.isatty() and "NO_COLOR" not in os.environ


def print_row(label: str, text: str, out: TextIO | None = None) -> None:
    """Print one of the rows that a user sees before and after a run."""
    out = out or sys.stderr
    start, end = ("\x1b[1m", "\x1b[0m") if has_colour(out) else ("", "")
    print(f"{start}{label:<9}{end}  {printable(text, LONGEST_ROW)}", file=out, flush=True)


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: 1 rank, 2 ranks. Without `plural`, the noun gets an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return sorted ranks as a person names them: "rank 3", "ranks 0-2, 7"."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(_in_runs([*map(str, ranks)]))}"


def name_numbers(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text; of many, consecutive ones as "1-1023"."""
    texts = [*map(str, numbers)]
    return ", ".join(_in_runs(texts) if len(texts) > MANY else texts)


def fold_names(names: Sequence[str]) -> list[str]:
    """Return names; of many, consecutive ones as SLURM writes them, such as node[0001-1024]."""
    if len(names) <= MANY:
        return [*names]
    folded = list[str]()
    split = map(_split_number, names)
    for (before, after, is_numbered), group in groupby(split, itemgetter(0)):
        numbers = [number for _, number in group]
        if is_numbered and len(numbers) > 1:
            numbers = [f"[{','.join(_in_runs(numbers))}]"]
        folded += [f"{before}{number}{after}" for number in numbers]
    return folded


def _split_number(name: str) -> tuple[tuple[str, str, bool], str]:
    """Return what hosts in a row have in common, and the last number of a host's first label.

    In common are the texts before and after the number, and whether there is one; otherwise it
    is "".
    """
    head, dot, domain = name.partition(".")
    before, number, rest = re.split(r"(\d*)(?=\D*$)", head, maxsplit=1)
    return (before, f"{rest}{dot}{domain}", number != ""), number


def _in_runs(numbers: Sequence[str]) -> list[str]:
    """Join consecutive numbers of the same width: 1, 2, 3, 7 become 1-3, 7."""
    runs = list[list[str]]()
    following = ""
    for number in numbers:
        if number and number == following:
            runs[-1][1:] = [number]  # a run is its first and its last number
        else:
            runs.append([number])
        following = f"{int(number) + 1:0{len(number)}}" if number else ""
    return ["-".join(run) for run in runs]


def group_ranks(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return each text with the sorted ranks that it is about; that of the lowest rank is first."""
    groups = dict[str, list[int]]()
    for rank, text in sorted(texts.items()):
        groups.setdefault(text, []).append(rank)
    return groups


def name_groups(groups: Mapping[str, Sequence[int]]) -> list[str]:
    """Return one line for each text, with the ranks that it is about; that of the fewest is last.

    Texts without ranks are remarks, which follow as they are.
    """
    by_size = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [f"{name_ranks(ranks)}: {text}" if ranks else text for text, ranks in by_size]


def install_command(package: str) -> str:
    """Return the command that installs a package for this Python, and keeps its torch."""
    words = [sys.executable, "-m", "pip", "install", package]
    # uv makes environments without pip. importlib.util.find_spec would also use setuptools' finder,
    # which mistakes this for a start of pip, and breaks torch.compile in processes forked later.
    if PathFinder.find_spec("pip") is None:
        words = ["uv", "pip", "install", "--python", sys.executable, package]
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    if package != "torch":  # packages such as torchvision require one version of it
        with contextlib.suppress(PackageNotFoundError):
            words.append(f"torch=={version('torch')}")
    return shlex.join(words)


def torch_cure() -> str:
    """Return what to do if this Python lacks torch.

    Outside an environment, a clone of this project can make one. An installation cannot: pip and
    make init install no Makefile.
    """
    root = Path(__file__).resolve().parents[1]
    has_environment = sys.prefix != sys.base_prefix or os.path.isdir(f"{sys.prefix}/conda-meta")
    command = install_command("torch")
    if not has_environment and (root / "Makefile").exists():
        command = f"make -C {shlex.quote(str(root))} setup"
    return f"set PYTHON to a Python that has it, or run {command}"


def whole(text: str) -> int:
    """Return a whole number; 0 for any other text."""
    return int(text) if text.isdecimal() else 0


def unwritable_fault(error: OSError) -> str:
    """Return the fault of a folder or file that cannot be written to."""
    return "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "dir-unwritable"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return "did you mean X? " with the most similar name; "" if none is similar."""
    from difflib import get_close_matches  # not at the top: the node agent does not need it

    # With their dashes or endings, any two options or files would be similar.
    plain = {_without_ending(name): name for name in names}
    near = get_close_matches(_without_ending(word), plain, 1)
    return f"did you mean {plain[near[0]]}? " if near else ""


def _without_ending(name: str) -> str:
    """Return an option without its dashes, or the name of a YAML file without its ending."""
    return name.lstrip("-").removesuffix(".yaml").removesuffix(".yml")


def short_host_name() -> str:
    """Return this machine's name without its domain."""
    return socket.gethostname().partition(".")[0]
