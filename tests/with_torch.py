"""Run the tests that another torch can break, under that torch: `make test-torch VERSION=2.6.0`.

Creates an environment below .tools/ with this Python, that torch, NumPy and PyYAML. Runs
the tests marked `another_torch` in it. Prints a one-row table: which parts pass, which fail and
why, and which are rejected by name because that torch is too old. Records the row in
bench/versions.json, from which the table in docs/admin.md is drawn. If a part fails, exits with 1
and records nothing, unless --record-failures is given.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import versions
from harness import name_commit, render

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests/unit"
ROWS = (
    *("launch", "failure block", "restart", "train.py", "FSDP", "snapshots", "hang", "self-test"),
    *("torchrun", "torch.distributed.launch", "shapes", "private names"),
)
LIMIT_S = 1800  # for one test: some start torchrun up to eight times, and an old torchrun can hang
PACKAGES = re.compile(r"^(?:PyYAML|pytest|pytest-xdist|hypothesis)==.*$", re.M)
# In pytest's lines that begin with E: a refusal, the cause in a failure block, any other line.
REFUSED = re.compile(
    r"^E +(?:[\w.]+: |cause +)*([^\n]*; install (?:torch )?[\d.]+ or newer[^\n\[]*\b)", re.M
)
CAUSE = re.compile(r"^E .*cause    (\S[^\n\\]*)", re.M)
LINE = re.compile(r"^E +(?!assert |\.\.\.|\+ +(?:where|and) )(\S.*)$", re.M)
Row = dict[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(prog="test-torch")
    parser.add_argument("--record-failures", action="store_true")
    parser.add_argument("version", nargs="?", default="")
    args = parser.parse_args()
    version = str(args.version)
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        print("test-torch: give VERSION=, a version of torch such as 2.6.0", file=sys.stderr)
        return 2

    python = install(version)
    commit = name_commit()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        code = run_tests(python, report)
        if code not in (0, 1):  # pytest's codes for tests that passed or failed
            return code
        row = read_row(report)
    if name_commit() != commit:
        commit += ", changed during the test"
    told = {"torch": version, "Python": name_python(), "commit": commit, **row}
    print(render([*told], [[*told.values()]]))

    has_failed = any(cell.startswith("FAIL") for cell in row.values())
    if has_failed and not args.record_failures:
        print("test-torch: not recorded, because a part fails; RECORD=failures records it, too")
    else:
        versions.record(versions.observe(version, platform.python_version(), commit, row))
    return int(has_failed)


def name_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def install(version: str) -> Path:
    """Return the Python of the environment, which is created if it is missing."""
    folder = ROOT / f".tools/torch-{version}-python{name_python()}"
    python = folder / "bin/python"
    if not python.exists():
        where = folder.relative_to(ROOT)
        print(f"installing torch {version} into {where} (up to 3 GB, 6 GB on disk)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pinned = "\n".join(
        (ROOT / one).read_text() for one in ("requirements.txt", "tests/requirements.txt")
    )
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    pip += ["--no-compile"]  # Python compiles what is imported, a small part of torch
    if subprocess.call([*pip, f"torch=={version}", "numpy", *PACKAGES.findall(pinned)]) != 0:
        sys.exit(f"test-torch: torch {version} cannot be installed for Python {name_python()}")
    return python


def run_tests(python: Path, report: Path) -> int:
    """Run all marked tests; returns pytest's exit code.

    Compiled code is kept beside the report: another torch may have left files elsewhere.
    """
    files = [one for one in TESTS.glob("test_*.py") if "mark.another_torch(" in one.read_text()]
    options = ["-q", "-n", "3", "--dist", "worksteal", "-m", "another_torch"]
    options += [f"--junitxml={report}", "-o", "junit_family=xunit1"]  # a format with properties
    options += ["-o", f"faulthandler_timeout={LIMIT_S}"]
    command = [str(python), "-m", "pytest", *options, *map(str, sorted(files))]
    own = {"PYTHON": str(python), "TMPDIR": str(report.parent)}
    return subprocess.call(command, cwd=ROOT, env={**os.environ, **own})


def read_row(report: Path) -> Row:
    """Return the cells of pytest's report, by the row that each test is marked with."""
    errors: dict[str, list[str]] = {row: [] for row in ROWS}  # of each test; empty: it passed
    for case in ElementTree.parse(report).iter("testcase"):
        named = case.find("properties/property[@name='another_torch']")
        row = "other" if named is None else named.get("value", "")
        found = [one.text or "" for one in (*case.iter("failure"), *case.iter("error"))]
        if case.find("skipped") is None:
            errors.setdefault(row, []).append("\n".join(found))
    return {row: describe(texts) for row, texts in errors.items()}


def describe(errors: list[str]) -> str:
    """Return a cell: what pytest reported about the tests of a row, in one line."""
    if not errors:
        return "FAIL: no test ran"
    refusals = [found[-1] for text in errors if (found := REFUSED.findall(text))]
    failures = [text for text in errors if text and not REFUSED.search(text)]
    if failures:
        found = CAUSE.findall(failures[0]) or LINE.findall(failures[0])
        return f"FAIL: {found[-1] if found else failures[0].strip().splitlines()[-1]}"
    passes = ["pass"] if "" in errors else []
    return "; ".join([*passes, *(f"refused: {one}" for one in dict.fromkeys(refusals))])


if __name__ == "__main__":
    sys.exit(main())
