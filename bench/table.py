"""Results of a bench: a Markdown table between its markers in bench/README.md."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path

import figures

README = Path(__file__).with_name("README.md")


def describe_machine(command: str) -> str:
    """Where, when and by which command figures came to be."""
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    name = model[1] if model else platform.machine()
    day = time.strftime("%Y-%m-%d")
    cores = len(os.sched_getaffinity(0))
    return f"{day}, {cores} cores ({name}), Python {platform.python_version()}: `{command}`"


def render(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_section(name: str, text: str) -> None:
    """Put `text` between the markers of section `name` of bench/README.md, and print it.

    The figures of the main README follow.
    """
    print(text)
    section = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    page = README.read_text(encoding="utf-8")
    README.write_text(section.sub(lambda at: f"{at[1]}{text}\n{at[2]}", page), encoding="utf-8")
    figures.write()
