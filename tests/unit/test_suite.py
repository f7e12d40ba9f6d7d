"""The suite itself: each promise has a test, changes are undone, a part that hangs is ended."""

import ast
import contextlib
import re
import runpy
import shutil
import signal
from pathlib import Path

import pytest
from agents import ROOT, eventually, run_program

from distributed.stop_signals import STOP_SIGNALS

TESTS = ROOT / "tests"
PROMISES = re.findall(r"^\| (.+) \| `(.+)`: (.+) \|$", (TESTS / "README.md").read_text(), re.M)


@pytest.mark.parametrize("turn", [1, 2])
def test_what_a_test_blocks_is_undone(turn: int) -> None:
    assert signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS) == set(), turn


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bats") is None, reason="bats is not installed")
def test_a_part_that_hangs_is_ended_and_counted(tmp_path: Path) -> None:
    """Runs in a copy of the suite, in which all checks of the code pass."""
    for folder in ("tests/scripts", "tests/cluster", "bench", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    script = (ROOT / "tests/run.sh").read_text().replace("PART_LIMIT=3h", "PART_LIMIT=3s")
    passes = "#!/bin/sh\necho 1 passed\n"
    tools = {f"bin/{name}": passes for name in ("python", "shellcheck", "shfmt")}
    for name, text in {"tests/run.sh": script, **tools}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tests/scripts/one.bats").write_text("@test one {\n  sleep 600\n}\n")
    done = run_program([tmp_path / "tests/run.sh", "fast"], PYTHON=str(tmp_path / "bin/python"))
    *_, why, count = done.stdout.splitlines()
    assert why == "failed  fast-scripts: did not finish within 3s"
    assert count.endswith(" passed, 1 failed, 0 skipped")
    eventually(lambda: not any(is_in(one, tmp_path) for one in Path("/proc").glob("[0-9]*/cwd")))


def is_in(link: Path, folder: Path) -> bool:
    with contextlib.suppress(OSError):  # it has exited, or is not ours
        return link.readlink() == folder
    return False


# --- make test-torch ------------------------------------------------------------------------------


BLOCK = """E   AssertionError: run        7
E     FAILED   rank 1 (local rank 1, vm) 0 s after the start       [rank-error]
E     cause    ValueError: batch 7 holds no samples
E   assert 1 == 0
"""
OLD = "this torch is too old to shard; install torch 2.6 or newer"
REFUSAL = f"E   AssertionError: run  7\nE     cause    {OLD} [unsupported]\nE   assert 2 == 0\n"


@pytest.mark.parametrize(
    ("errors", "cell"),
    [
        ([], "FAIL: no test ran"),
        (["", ""], "pass"),
        (["", BLOCK], "FAIL: ValueError: batch 7 holds no samples"),
        (["E   OSError: no place\n"], "FAIL: OSError: no place"),
        ([REFUSAL, REFUSAL], f"refused: {OLD}"),
        ([REFUSAL, ""], f"pass; refused: {OLD}"),
        ([REFUSAL, BLOCK], "FAIL: ValueError: batch 7 holds no samples"),
    ],
)
def test_a_cell_tells_what_its_tests_did(errors: list[str], cell: str) -> None:
    assert runpy.run_path(f"{ROOT}/tests/with_torch.py")["describe"](errors) == cell


# --- the promises of README.md --------------------------------------------------------------------


def is_run(file: Path, name: str) -> bool:
    """Return whether `make test` runs a test of that name, which in bats may be a prefix."""
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
