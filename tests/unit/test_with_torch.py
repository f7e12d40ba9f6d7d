"""`make test-torch`: its row of the table, from what pytest reports."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = '''
import pytest

BLOCK = """run        7
FAILED   rank 1 (local rank 1, vm) 0 s after the start       [rank-error]
cause    ValueError: batch 7 holds no samples
see      TROUBLESHOOTING.md#rank-error
"""
OLD = "launch.sh: this torch is too old to shard; install torch 2.6 or newer [unsupported]"

@pytest.mark.another_torch("launch")
@pytest.mark.parametrize("number", [1, 2])
def test_passes(number):
    pass

@pytest.mark.another_torch("restart")
@pytest.mark.parametrize("code", [0, 1])
def test_fails_with_a_block(code):
    assert code == 0, BLOCK

@pytest.fixture
def broken():
    raise OSError("no place")

@pytest.mark.another_torch("train.py")
def test_has_an_error(broken):
    pass

@pytest.mark.another_torch("hang")
def test_compares():
    assert [1, 2] == [1, 3]

@pytest.mark.another_torch("FSDP")
def test_is_refused():
    assert 3 == 0, f"{OLD}\\nmore\\n"

@pytest.mark.another_torch("snapshots")
@pytest.mark.parametrize("told", [OLD, BLOCK])
def test_is_refused_in_part(told):
    assert not told, told

@pytest.mark.another_torch("self-test")
@pytest.mark.parametrize("code", [0, 2, 3])
def test_is_refused_here_and_there(code):
    assert code == 0, f"run  7\\ncause    {OLD}"

@pytest.mark.another_torch("shapes")
def test_is_skipped():
    pytest.skip("not here")
'''
CELLS = {
    "launch": "pass",
    "restart": "FAIL: ValueError: batch 7 holds no samples",
    "train.py": "FAIL: OSError: no place",
    "FSDP": "refused: this torch is too old to shard; install torch 2.6 or newer",
    "snapshots": "FAIL: ValueError: batch 7 holds no samples",
    "self-test": "pass; refused: this torch is too old to shard; install torch 2.6 or newer",
    "shapes": "FAIL: no test ran",
    "torchrun": "FAIL: no test ran",
}


@pytest.mark.slow
def test_each_row_tells_what_its_tests_did(tmp_path: Path) -> None:
    (tmp_path / "test_samples.py").write_text(SAMPLES)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", f"{ROOT}/pyproject.toml"]
    command += [f"--junitxml={report}", "-o", "junit_family=xunit1", str(tmp_path)]
    path = os.pathsep.join([str(ROOT), f"{ROOT}/tests/unit"])
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)
    row = runpy.run_path(f"{ROOT}/tests/with_torch.py")["read_row"](report)
    assert {name: row[name] for name in CELLS} == CELLS
    assert row["hang"].startswith("FAIL: ")


def test_a_version_is_asked_for() -> None:
    command = ["make", "-s", "test-torch", f"PYTHON={sys.executable}", "VERSION=newest"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.startswith("test-torch: give VERSION=, a version of torch such as 2.6.0\n")
