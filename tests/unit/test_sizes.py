"""The limits of size: of each file, class and function, and of each wing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Lines of each wing, more than planned: 1,700, 3,400, 1,600 and 1,700. They must not grow.
BUDGETS = {
    ("distributed",): 3121,
    ("launcher",): 13279,
    ("scripts",): 1600,
    ("training", "train.py"): 2913,
}
FILE, CLASS, FUNCTION = 350, 250, 60  # lines
LONGER = {"train.py:train": 100}  # the training loop reads from top to bottom


def files_of(*places: str) -> list[Path]:
    """Return the Python and bash files, each once."""
    files: list[Path] = []
    for place in places:
        path = ROOT / place
        files += [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.sh")]
    return sorted({file.resolve() for file in files})


FILES = [file for places in BUDGETS for file in files_of(*places)]


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def parts_of_python(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the length and the limit of each class and function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            limit = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
            yield node.name, (node.end_lineno or 0) - node.lineno + 1, limit


def parts_of_bash(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the same of bash as shfmt sets it: a function ends at the first `}` in its column."""
    for match in re.finditer(r"^( *)([\w-]+)\(\) [{(](?: #.*)?\n(?:.*\n)*?\1[})]", text, re.M):
        yield match[2], match[0].count("\n") + 1, FUNCTION


def too_long(path: Path) -> list[str]:
    name = str(path.relative_to(ROOT))
    parts = parts_of_python if path.suffix == ".py" else parts_of_bash
    found = [
        (f"{name}:{part}", length, LONGER.get(f"{name}:{part}", limit))
        for part, length, limit in parts(path.read_text())
    ]
    found.append((name, lines_of(path), FILE))
    return [f"{what}: {length} > {limit}" for what, length, limit in found if length > limit]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_longer_than_its_limit(path: Path) -> None:
    assert too_long(path) == []


@pytest.mark.parametrize("places", BUDGETS, ids=" ".join)
def test_a_wing_keeps_to_its_budget(places: tuple[str, ...]) -> None:
    assert sum(map(lines_of, files_of(*places))) <= BUDGETS[places]


def test_the_measures_see_what_is_long() -> None:
    body = "    x = 1\n" * 60
    (found,) = parts_of_python(f"def f():\n{body}")
    assert found == ("f", 61, 60)
    body = "  echo }\n" * 60
    bash = f"one_line() {{ echo; }}\nf() {{ # <a>\n{body}}}\ng() (\n  echo\n)\n"
    assert list(parts_of_bash(bash)) == [("f", 62, 60), ("g", 3, 60)]
