"""`make test-gpu` on a machine without a GPU: what needs none is tried, the other rows say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "tests/gpu"


@pytest.mark.long
def test_each_row_passes_or_says_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    command = [sys.executable, str(GPU), "--json", str(file), "gloo", "preflight", "launcher"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "bench")])
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {row["name"]: row["result"] for row in json.loads(file.read_text())}
    assert results.pop("gloo, two ranks on one GPU") == "pass"
    assert len(results) == 3 and {*results.values()} == {"needs a GPU"}
    assert done.stdout.endswith("\n1 passed, 0 failed, 3 not run\n")
