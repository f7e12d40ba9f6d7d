"""What users read about settings, from the table in launcher/plan/settings.ini.

python -m docs.reference [--check]     (make reference; make lint checks)

Writes the marked parts of docs/reference.md, and scripts/lib/help.txt, which --help shows without
Python. With --check, it writes nothing, and fails if one of them is not what the table says.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from configparser import ConfigParser
from dataclasses import dataclass, fields
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from launcher.cli.options import COMMANDS
from launcher.plan import settings
from launcher.plan.settings import FILE, Setting

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference.md"
HELP = ROOT / "scripts/lib/help.txt"

# The comment in test_distributed_integration.sh is its whole help.
LAUNCHERS = [name for name in COMMANDS if name != "test_distributed_integration"]


@dataclass(frozen=True)
class Entry(Setting):
    """An entry of the table, with its texts for users."""

    meaning: str = ""
    default: str = ""
    applies: str = ""
    row_below: str = ""
    help: str = ""
    label: str = ""
    shown_by: str = ""
    help_of_launch: str = ""
    help_below: str = ""


def read_entries() -> Iterator[tuple[str, Entry]]:
    """Yield the entries by header. Raises TypeError if one has a key that nothing reads."""
    parser = ConfigParser(interpolation=None)
    parser.read(FILE)
    known = {field.name for field in fields(Setting)}
    for header, setting in settings.TABLE.items():
        texts = {key: text for key, text in parser[header].items() if key not in known}
        yield header, Entry(**vars(setting), **texts)


TABLE = dict(read_entries())
VARIABLES = {name: TABLE[name] for name in settings.VARIABLES}

WIDTH = 100  # columns of a page
OPTION_WIDTH, VARIABLE_WIDTH = 14, 17  # of the names in --help


def main(arguments: Sequence[str]) -> int:
    """Write the files that are not up to date, or name them. Returns the exit code."""
    texts = {PAGE: write_page(PAGE.read_text()), HELP: "\n".join(help_lines()) + "\n"}
    stale = [file for file, text in texts.items() if file.read_text() != text]

    for file in stale:
        if "--check" in arguments:
            print(f"{file.relative_to(ROOT)} is not up to date; run make reference")
        else:
            file.write_text(texts[file])
    return int("--check" in arguments and bool(stale))


# --- docs/reference.md --------------------------------------------------------------------------


def write_page(page: str) -> str:
    """Return the page with its marked parts written again."""

    def write(part: re.Match[str]) -> str:
        return f"{part['start']}\n{part_of_page(part['mark'])}\n{part['end']}"

    marks = r"(?P<start> *<!-- make reference: (?P<mark>[^\n]*) -->)\n.*?\n(?P<end> *<!-- end -->)"
    return re.sub(marks, write, page, flags=re.DOTALL)


def part_of_page(mark: str) -> str:
    """Return a part by the text of its mark, such as `options of run_ddp, launch`."""
    kind, _, commands = mark.partition(" of ")
    if kind == "options":
        return table_of(["option", "meaning"], option_rows(commands.split(", ")))

    if kind == "variables":
        rows = [variable_row(name, setting) for name, setting in VARIABLES.items()]
        return table_of(["variable", "default", "applies to", "meaning"], rows)

    assert kind == "sent", f"no part of the page is called {kind!r}"
    return "\n".join(sent_lines())


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of the rows that have a last cell, its meaning."""
    lines = [line_of(columns), "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(line_of(row) for row in rows if row[-1])])


def line_of(cells: Sequence[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def option_rows(commands: Sequence[str]) -> Iterator[list[str]]:
    """Yield a row for each entry of options that one of these commands accepts."""
    below = {header: setting.row_below for header, setting in TABLE.items()}
    for setting in arrange(below):
        names = [word.partition("=")[0] for word in setting.names]
        if is_option(setting) and {*commands} & {*setting.commands}:
            yield [", ".join(f"`{name}`" for name in names), one_line(setting.meaning)]


def variable_row(name: str, setting: Entry) -> list[str]:
    applies = setting.applies or "all"
    return [f"`{name}`", *map(one_line, (setting.default, applies, setting.meaning))]


def sent_lines() -> Iterator[str]:
    """Yield a list of other programs' variables, by what they are for."""
    for setting in TABLE.values():
        if setting.sent:
            names = ", ".join(f"`{name}`" for name in setting.sent)
            text = f"  - {names}: {one_line(setting.meaning)};"
            yield from textwrap.wrap(text, WIDTH, subsequent_indent=" " * 4, break_on_hyphens=False)


def one_line(text: str) -> str:
    return text.replace("\n", " ")


def is_option(setting: Entry) -> bool:
    return setting.names[0].startswith("-")


def arrange(below: Mapping[str, str]) -> Iterator[Entry]:
    """Yield the entries in the order of the table, except that some go below others, by header."""

    def place(under: str) -> Iterator[Entry]:
        for header, other in below.items():
            if other == under:
                yield TABLE[header]
                yield from place(header)

    yield from place("")


# --- scripts/lib/help.txt -----------------------------------------------------------------------


def help_lines() -> Iterator[str]:
    """Yield the lines of help.txt. Above an entry, a line names its commands, unless all have it.

    `print_help` in scripts/lib/launch.sh reads these lines. The first belongs to no entry. An entry
    with many commands stands there again for those that the line has no room for.
    """
    yield "# Written by make reference, from launcher/plan/settings.ini; do not edit."
    for commands, entries in groupby(help_entries(), itemgetter(0)):
        shown = [line for _, lines in entries for line in lines]
        for names in textwrap.wrap(commands, WIDTH, subsequent_indent="# "):
            yield from [names, *shown]


def help_entries() -> Iterator[tuple[str, list[str]]]:
    """Yield what --help shows: the line for its commands, and the lines that users see."""
    below = {}
    for header, setting in TABLE.items():
        below[header] = find_header(setting.help_below) if setting.help else ""
    entries = [setting for setting in arrange(below) if setting.help]
    variables = [setting for setting in entries if setting.names[0] in VARIABLES]

    yield "#", ["Options:"]
    for setting in entries:
        if setting not in variables:
            label = setting.label or setting.names[0]
            yield line_for(setting.shown_by), entry(label, OPTION_WIDTH, setting.help)

    yield "#", ["", "Environment variables (an argument on the command line wins):"]
    for setting in variables:
        names = ", ".join([*setting.names, *sharing(setting.names[0])])
        if setting.help_of_launch:
            yield line_for("launch"), entry(names, VARIABLE_WIDTH, setting.help_of_launch)
        yield line_for(setting.shown_by), entry(names, VARIABLE_WIDTH, setting.help)


def find_header(name: str) -> str:
    """Return the header of the entry with this option or variable; "" if no name is given."""
    return next((header for header, one in TABLE.items() if name in one.names), "")


def sharing(name: str) -> list[str]:
    """Return the variables without a text of their own, which share that of this one."""
    return [other for other, one in VARIABLES.items() if one.help_below == name and not one.help]


def entry(names: str, width: int, text: str) -> list[str]:
    """Return the lines of an entry; its text begins on a line of its own beside long names."""
    first, *more = text.split("\n")
    heads = [f"  {names:<{width}}{first}"]
    if len(names) >= width:
        heads = [f"  {names}", f"  {'':<{width}}{first}"]
    return [*heads, *(f"  {'':<{width}}{line}" for line in more)]


def line_for(shown_by: str) -> str:
    """Return the line above an entry: `#`, then the commands that show it, unless all do.

    If that is shorter, it is `#!`, then those that do not.
    """
    names = re.findall(r"\w+", shown_by.removeprefix("all but "))
    if not names:
        return "#"
    is_reverse = shown_by.startswith("all but ")
    shown = [name for name in LAUNCHERS if (name in names) != is_reverse]
    others = [name for name in LAUNCHERS if name not in shown]
    return min(" ".join(["#", *shown]), " ".join(["#!", *others]), key=len)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
