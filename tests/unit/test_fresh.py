"""What a script sets before it imports torch counts in its ranks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from agents import AGENT

from launcher.agent.fresh import variables_set_early


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import os, torch\nos.environ['OMP_NUM_THREADS'] = '2'\n", []),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n", ["OMP_NUM_THREADS"]),
        ("import os\nos.environ['HOME'] = '/'\nimport torch\n", []),
        ("from os import environ\nenviron.setdefault('MKL_X', '1')\n", ["MKL_X"]),
        ("import os\nos.environ.update({'TORCH_LOGS': 'x'}, OMP_X='1')\n", ["TORCH_LOGS", "OMP_X"]),
        ("import os\nos.environ |= {'CUDA_X': '1'}\nfrom torch import nn\n", ["CUDA_X"]),
        ("import os\nos.putenv('KMP_X', '1')\nimport torch.nn\n", ["KMP_X"]),
        ("import os\nif True:\n    os.environ['OMP_X'] = '1'\n", ["OMP_X"]),
        ("import os\nprint(os.environ['OMP_X'])\nimport torch\n", []),
        ("import mine\nimport torch\n", ["TORCH_MINE"]),
        ("from package import part\nimport torch\n", ["TORCH_PART"]),
        ("import with_torch, mine\n", []),
        ("import os\nos.environ['OMP_X'] = (\n", []),
        (f"import os\nx = {'1 + ' * 1500}1\nos.environ['OMP_X'] = '1'\n", ["OMP_X"]),
        ("import torchvision, os\nos.environ['OMP_X'] = '1'\n", ["OMP_X"]),
    ],
)
def test_names_that_are_set_before_torch(tmp_path: Path, text: str, names: list[str]) -> None:
    (tmp_path / "mine.py").write_text("import os\nos.environ['TORCH_MINE'] = '1'\nimport script\n")
    (tmp_path / "with_torch.py").write_text("import torch\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/part.py").write_text("import os\nos.environ['TORCH_PART'] = '1'\n")
    script = tmp_path / "script.py"
    script.write_text(text)
    assert variables_set_early(script, tmp_path) == names


SCRIPT = """
import os
os.environ["OMP_NUM_THREADS"] = "2"
import torch
import sys
print(torch.get_num_threads(), os.environ.get("TORCHINDUCTOR_CACHE_DIR"), "x" in sys.argv)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "threads", "told"), [(None, 2, True), ("1", 2, True), ("0", 1, False)]
)
def test_ranks_are_started_anew(
    tmp_path: Path, choice: str | None, threads: int, told: bool
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    # What an import of torch has added to this process is not for the agent.
    ours = ("FRESH", "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    ended = subprocess.run(
        [*AGENT, "--nproc-per-node", "2", "script.py", "x"],
        capture_output=True,
        text=True,
        env={**environ, **({"FRESH": choice} if choice else {})},
        cwd=tmp_path,
        timeout=120,
    )
    assert ended.stdout == f"{threads} None True\n" * 2, ended.stderr
    notice = "node agent: each rank imports torch anew, for script.py sets OMP_NUM_THREADS first"
    assert (notice in ended.stderr) == (told and choice is None)


@pytest.mark.slow
def test_fresh_is_0_or_1(tmp_path: Path) -> None:
    ended = subprocess.run(
        [*AGENT, "script.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "FRESH": "yes"},
        cwd=tmp_path,
        timeout=120,
    )
    assert ended.returncode == 2 and "FRESH is 'yes'; give 1" in ended.stderr
