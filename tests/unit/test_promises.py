"""Each promise of tests/README.md has a test, and `make test` runs it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PROMISES = re.findall(r"^\| (.+) \| `(.+)`: (.+) \|$", (TESTS / "README.md").read_text(), re.M)


def is_run(file: Path, name: str) -> bool:
    """Return whether `make test` runs a test of that name, or one whose name begins so in bats."""
    text = file.read_text()
    if file.suffix == ".py":
        functions = [one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)]
        found = [one for one in functions if one.name == name]
        marks = [ast.unparse(mark) for one in found for mark in one.decorator_list]
        return len(found) == 1 and "pytest.mark.long" not in marks
    start = re.escape(f'@test "{name}')
    tests = re.findall(rf"^((?:# bats test_tags=.*\n)?){start}", text, re.M)
    return len(tests) == 1 and not re.search(r"\blong\b", tests[0]) and "file_tags" not in text


@pytest.mark.parametrize(("promise", "file", "name"), PROMISES, ids=lambda text: text[:60])
def test_each_promise_has_its_test(promise: str, file: str, name: str) -> None:
    assert is_run(TESTS / file, name)


def test_make_prove_has_a_part_for_each_file_of_the_cluster() -> None:
    parts, files = (TESTS / "prove.py").read_text(), (TESTS / "cluster").glob("*.bats")
    tagged = [one.stem for one in files if re.search(r"_tags=.*\bprove\b", one.read_text())]
    assert tagged and [name for name in tagged if f'"{name}"' not in parts] == []


def test_no_row_is_overlooked() -> None:
    lines = (TESTS / "README.md").read_text().splitlines()
    assert len(PROMISES) == sum("`: " in line for line in lines if line.startswith("|")) > 30


def test_a_test_that_is_left_out_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import pytest\n\n\n@pytest.mark.long\ndef test_it():\n  pass\n")
    (tmp_path / "a.bats").write_text('# bats test_tags=prove,long\n@test "it ends" {\n}\n')
    (tmp_path / "b.bats").write_text('# bats test_tags=prove\n@test "it ends" {\n}\n')
    assert not is_run(tmp_path / "a.py", "test_it")
    assert not is_run(tmp_path / "a.bats", "it ends")
    assert not is_run(tmp_path / "b.bats", "it begins") and is_run(tmp_path / "b.bats", "it")
