"""Every option and every environment variable, as settings.ini beside this file declares them.

train.py has its own. A new one needs an entry in that table, the code that uses its value, and a
test. `make reference` then writes what --help shows, and the tables of docs/reference.md.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.environment import check_run_id
from launcher.text import Environ, PlanError, did_you_mean

FILE = Path(__file__).with_suffix(".ini")
_LISTS = {"names_nodes", "words", "sent", "own"}


@dataclass(frozen=True)
class Setting:
    """An entry of the table. The comment at the top of settings.ini explains the fields.

    The texts for users are left to docs/reference.py: a launch does not need them.
    """

    commands: Sequence[str]  # that accept these options; [""]: all
    names: Sequence[str]  # options as `--flag`, `--name=` or `--name=field`, or one variable
    field: str = ""
    task: str = ""
    names_nodes: Sequence[str] = ()
    words: Sequence[str] = ()
    least: str = ""
    most: str = ""
    shape: str = "(?s).*"
    resume: str = ""
    resume_over_ssh: str = ""
    agent: str = ""
    hidden: str = ""
    sent: Sequence[str] = ()
    own: Sequence[str] = ()

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the most that a number may be."""
        return int(self.least), int(self.most)


def _read_table() -> Iterator[tuple[str, Setting]]:
    """Yield the entries by header. configparser could read them, but its import takes longer."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for header, lines in re.findall(r"^\[(.+)\]\n((?:.+\n)*)", text, re.MULTILINE):
        commands, _, names = header.rpartition(": ")
        given = dict[str, Any]()
        for key, value in re.findall(r"^(\w+) = (.*(?:\n .*)*)", lines, re.MULTILINE):
            if key in Setting.__annotations__:
                line = re.sub(r"\n +", " ", value)  # further lines of a value are indented
                given[key] = line.split(", ") if key in _LISTS else line
        yield header, Setting(commands.split(", "), names.split(", "), **given)


TABLE = dict(_read_table())
VARIABLES = {name: setting for name, setting in TABLE.items() if name.isupper()}


def in_order(key: str) -> list[str]:
    """Return the names of the variables that have a place under this key, in that order."""
    places = {name: getattr(setting, key) for name, setting in VARIABLES.items()}
    return sorted(filter(places.get, places), key=lambda name: int(places[name]))


# --- values -------------------------------------------------------------------------------------


def find_nproc(environ: Environ) -> str:
    """Return NPROC_PER_NODE in our spelling; "" if it is not set, or cannot be ours."""
    with contextlib.suppress(PlanError):
        return read_value("NPROC_PER_NODE", environ.get("NPROC_PER_NODE", ""))
    return ""


def read_value(name: str, given: str) -> str:
    """Return a value in our spelling. Raises PlanError or LauncherError if it cannot be ours.

    The variable's entry has its words, in any case, its bounds or its shape; if it has none of
    these, any value can be ours.
    """
    if name == "RUN_ID":
        return check_run_id(given)

    setting = VARIABLES[name]
    if found := [word for word in setting.words if word.lower() == given.lower()]:
        return found[0]
    if setting.most:
        return str(read_number(name, given, *setting.bounds))
    if not setting.words and re.fullmatch(setting.shape, given):
        return given

    cure = f"choose from {', '.join(setting.words)}" if setting.words else "see --help"
    raise PlanError(f"{name} is {given!r}; {did_you_mean(given, setting.words)}{cure}")


def read_nproc(what: str, text: str | None) -> int | None:
    """Return a number of ranks per node; None for "auto", or if none was given. Raises PlanError.

    `what` names the number in the message.
    """
    if text is None or text == "auto":
        return None
    others = ", or auto (launch.sh --nproc-per-node: also gpu or cpu)"
    return read_number(what, text, *VARIABLES["NPROC_PER_NODE"].bounds, others)


def read_number(what: str, text: str, low: int, high: int, others: str = "") -> int:
    """Return a whole number from low to high. Raises PlanError for any other text.

    The message calls it `what`, and ends with `others`, the other values that the caller accepts.
    """
    if re.fullmatch(r"0|[1-9][0-9]{0,8}", text) and low <= int(text) <= high:
        return int(text)
    raise PlanError(f"{what} is {text!r}; give a whole number from {low} to {high}{others}")
