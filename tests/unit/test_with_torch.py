"""`make test-torch`: the cells of its table, from what pytest reports."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
