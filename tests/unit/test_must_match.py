"""What must be the same on every node."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_what_is_the_same_is_told_without_torch() -> None:
    code = "import json; from launcher.preflight.must_match import versions"
    code += "; print(json.dumps(versions()))"
    ours = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    code = "import torch; print(torch.__version__)"
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(ours.stdout)["torch"] == theirs.stdout.strip()


def test_this_project_is_hashed_too(tmp_path: Path) -> None:
    for name in ("launcher", "distributed", "training"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc"))
    code = "from pathlib import Path; from launcher.preflight import must_match"
    code += "; print(must_match.hash_files([], Path())['this project'])"

    def hash_of(folder: Path) -> str:
        return subprocess.check_output([sys.executable, "-c", code], cwd=folder, text=True)

    assert hash_of(tmp_path) == hash_of(ROOT)
    (tmp_path / "training/tasks/__init__.py").write_text("changed")
    assert hash_of(tmp_path) != hash_of(ROOT)
