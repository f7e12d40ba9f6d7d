"""The table of tested versions: what `make test-torch` records, and draws into docs/admin.md."""

import ast
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import versions
import warm
from agents import ROOT

WITH_TORCH = f"{ROOT}/tests/with_torch.py"
PASSED = {"launch": "pass", "FSDP": "pass"}


def test_the_page_shows_what_the_command_recorded() -> None:
    """`python bench/versions.py` draws the table again."""
    section = f"<!-- versions -->\n{versions.text()}<!-- /versions -->"
    assert section in versions.PAGE.read_text(encoding="utf-8")


def test_every_recorded_row_has_each_part() -> None:
    rows = versions.read()
    assert rows
    for row in rows:
        assert [*row.cells] == [*runpy.run_path(WITH_TORCH)["ROWS"]], row


# --- what the marked tests need -------------------------------------------------------------------


FOLDERS = (ROOT, ROOT / "tests/unit", ROOT / "bench")  # pytest's pythonpath
# By with_torch.py; pytest brings packaging.
INSTALLED = {"hypothesis", "numpy", "packaging", "pytest", "torch", "yaml"}


def test_the_marked_tests_import_only_what_their_environment_has() -> None:
    """Also looks into the modules that they import; imports within functions do not count."""
    files = [ROOT / "tests/unit/conftest.py"]
    for one in (ROOT / "tests/unit").glob("test_*.py"):
        if "mark.another_torch(" in one.read_text():
            files.append(one)
    assert len(files) > 10
    seen: set[Path] = set()
    while files:
        file = files.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in imported(file):
            own = find_own(name)
            files += own
            package = name.partition(".")[0]
            is_known = own or package in sys.stdlib_module_names or package in INSTALLED
            assert is_known, f"{file.relative_to(ROOT)} imports {name}"


def imported(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports when it is imported."""
    for one in ast.parse(file.read_text()).body:
        if isinstance(one, ast.Import):
            yield from (alias.name for alias in one.names)
        elif isinstance(one, ast.ImportFrom) and one.module and not one.level:
            yield one.module


def find_own(name: str) -> list[Path]:
    """Return the file of a module of this project, or the folder's __init__.py."""
    places = [folder / name.replace(".", "/") for folder in FOLDERS]
    files = [path for one in places for path in (one.with_suffix(".py"), one / "__init__.py")]
    return [path for path in files if path.exists()]


def test_a_fork_lacks_only_the_packages_that_are_missing() -> None:
    warm.import_installed(("wave", "no_such_package.part"))
    assert "wave" in sys.modules
    with pytest.raises(ImportError):
        warm.import_installed(("yaml.no_such_part",))


# --- the record -----------------------------------------------------------------------------------


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that records a row, in files of this test."""
    page, file = tmp_path / "admin.md", tmp_path / "versions.json"
    page.write_text("before\n<!-- versions -->\n<!-- /versions -->\nafter\n")
    file.write_text("[]")
    monkeypatch.setattr(versions, "FILE", file)
    monkeypatch.setattr(versions, "PAGE", page)

    def record_row(torch: str, python: str, **cells: str) -> None:
        versions.record(versions.observe(torch, python, "12345678", {**PASSED, **cells}))

    return record_row


def test_a_row_replaces_the_one_of_the_same_versions(record: Callable[..., None]) -> None:
    record("2.9.1", "3.12.1", FSDP="FAIL: OSError: no place")
    record("2.11.0", "3.12.1")
    record("2.9.1", "3.9.18")
    record("2.9.1", "3.12.4")
    found = [(row.torch, row.python, row.cells["FSDP"]) for row in versions.read()]
    assert found == [
        ("2.11.0", "3.12.1", "pass"),
        ("2.9.1", "3.12.4", "pass"),
        ("2.9.1", "3.9.18", "pass"),
    ]
    page = versions.PAGE.read_text()
    assert page.startswith("before\n<!-- versions -->\n| torch |") and page.endswith("\nafter\n")
    assert page.count("2 of 2 pass |") == 3 and "12345678" in page


def test_a_result_names_what_did_not_pass() -> None:
    cells = {"launch": "pass", "FSDP": "refused: too old", "snapshots": "refused: too old"}
    assert versions.summarise(cells) == "1 of 3 pass; FSDP, snapshots: refused: too old"


def git(folder: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *own, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_changed_file_is_told_beside_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that the commands write themselves does not count."""
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(harness, "WRITTEN", ("page",))
    assert harness.name_commit() == "not recorded"
    git(tmp_path, "init", "-q")
    for name in ("page", "code"):
        (tmp_path / name).write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "--short=8", "HEAD")
    (tmp_path / "page").write_text("two")
    assert harness.name_commit() == commit
    (tmp_path / "code").write_text("two")
    assert harness.name_commit() == f"{commit}, changed"


@pytest.mark.parametrize(
    ("words", "cell", "code", "is_recorded"),
    [
        ([], "pass", 0, True),
        ([], "FAIL: OSError: no place", 1, False),
        (["--record-failures"], "FAIL: OSError: no place", 1, True),
    ],
)
def test_a_failure_is_recorded_only_on_request(
    words: list[str],
    cell: str,
    code: int,
    is_recorded: bool,
    record: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program: dict[str, Any] = runpy.run_path(WITH_TORCH)
    main = program["main"]
    replaced = {
        "install": lambda version: Path(sys.executable),
        "run_tests": lambda python, report: 0,
        "read_row": lambda report: {"launch": cell},
    }
    monkeypatch.setattr(sys, "argv", ["with_torch.py", *words, "2.6.0"])
    for name, function in replaced.items():
        monkeypatch.setitem(main.__globals__, name, function)
    assert main() == code
    assert [row.cells for row in versions.read()] == ([{"launch": cell}] if is_recorded else [])
