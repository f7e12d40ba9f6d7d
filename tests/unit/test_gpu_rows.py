"""`make test-gpu` on a machine without a GPU: what needs none is tried, the other rows say so."""

from __future__ import annotations

import importlib.util
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


def test_a_row_that_fails_is_told_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(GPU)
    spec = importlib.util.spec_from_file_location("gpu_main", GPU / "__main__.py")
    assert spec and spec.loader
    main = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_main", main)
    spec.loader.exec_module(main)
    machine = main.Machine(tmp_path, 60.0)

    def fails(machine: object) -> str:
        raise main.Failed("no\nsuch thing")

    def breaks(machine: object) -> str:
        raise KeyError("loss")

    seen = [main.see(main.Row("row", one, False), machine) for one in (fails, breaks)]
    assert [(one.result, one.told) for one in seen] == [
        ("FAIL", "no such thing"),
        ("FAIL", "KeyError: 'loss'"),
    ]
    ended = machine.run([sys.executable, "-c", "print('cause  E [rank-error]'); exit(7)"])
    with pytest.raises(main.Failed, match=r"code 7 \[rank-error\] in place of code 0"):
        ended.expect()
