"""The versions of torch and Python that were tested: bench/versions.json and docs/admin.md.

`make test-torch` records its row and draws the table; python bench/versions.py only draws it.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import harness

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "bench/versions.json"
PAGE = ROOT / "docs/admin.md"
_SECTION = re.compile(r"(<!-- versions -->\n).*?(<!-- /versions -->)", re.DOTALL)


@dataclass(frozen=True)
class Tested:
    """What one `make test-torch` has shown."""

    torch: str
    python: str
    date: str  # 2026-11-28
    machine: str
    commit: str  # as harness.name_commit() gives it
    cells: dict[str, str]  # what was seen, by the row that the tests are marked with


def observe(torch: str, python: str, commit: str, cells: dict[str, str]) -> Tested:
    """Return what was seen today on this machine."""
    return Tested(torch, python, time.strftime("%Y-%m-%d"), harness.name_machine(), commit, cells)


def read() -> list[Tested]:
    """Return the recorded rows, the newest torch first."""
    return [Tested(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))]


def record(row: Tested) -> None:
    """Record a row in place of the one of the same torch and Python, and draw the table."""
    others = [one for one in read() if _key(one) != _key(row)]
    rows = sorted([*others, row], key=_key, reverse=True)
    text = json.dumps([asdict(one) for one in rows], indent=2)
    FILE.write_text(f"{text}\n", encoding="utf-8")
    draw()


def _key(row: Tested) -> list[list[int]]:
    """Return torch's version, and Python's without its last part, as numbers."""
    torch, python = (
        [int(part) for part in version.split(".")] for version in (row.torch, row.python)
    )
    return [torch, python[:2]]


def draw() -> None:
    """Put the table into docs/admin.md."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_SECTION.sub(lambda at: f"{at[1]}{text()}{at[2]}", page), encoding="utf-8")


def text() -> str:
    """Return the table for docs/admin.md."""
    head = ["torch", "Python", "date", "machine", "commit", "result"]
    rows = [
        [row.torch, row.python, row.date, row.machine, row.commit, summarise(row.cells)]
        for row in read()
    ]
    return harness.render(head, rows) + "\n"


def summarise(cells: dict[str, str]) -> str:
    """Return the result of all parts in one cell; parts that differ from "pass" are named."""
    parts_of: dict[str, list[str]] = {}
    for part, cell in cells.items():
        parts_of.setdefault(cell, []).append(part)
    passed = len(parts_of.pop("pass", []))
    others = [f"{', '.join(parts)}: {cell}" for cell, parts in parts_of.items()]
    return "; ".join([f"{passed} of {len(cells)} pass", *others])


if __name__ == "__main__":
    draw()
