"""Variables that a script sets before it imports torch take effect in its ranks."""

from pathlib import Path

import pytest
from agents import AGENT, execute, rarely, written

from launcher.agent.rank.fresh import variables_set_early


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
        ("import os\nprint(os.environ['OMP_X'])\nimport torch\n", []),
        ("import os\nfor k in ('OMP_X', 'MKL_X'): os.getenv(k, '-')\nimport torch\n", []),
        ("import os\nprint(os.environ.get('OMP_X', '1'))\nimport torch\n", []),
        ("import os\nos.environ['OMP_X'] = (\n", []),
        (f"import os\nx = {'1 + ' * 1500}1\nos.environ['OMP_X'] = '1'\n", ["OMP_X"]),
        ("import torchvision, os\nos.environ['OMP_X'] = '1'\n", ["OMP_X"]),
        ("def f():\n    import torch\nimport os\nos.environ['OMP_X'] = '1'\n", ["OMP_X"]),
        ("def f():\n    import torch, os\n    os.environ['OMP_X'] = '1'\nf()\n", ["OMP_X"]),
        ("from os import environ as E\nE['OMP_X'] = '1'\n", ["OMP_X"]),
        ("import os\nE = os.environ\nE.update(OMP_X='1')\nimport torch\n", ["OMP_X"]),
        ("import os\nos.environ.update(config['env'])\nimport torch\n", ["variables"]),
        ("import os\nfor k in x:\n    os.environ[k] = '1'\nimport torch\n", ["variables"]),
        ("if TYPE_CHECKING:\n    import torch\nE = os.environ\nE['OMP_X'] = '1'\n", ["OMP_X"]),
        ("import os\nif os.environ['OMP_X'] == '1':\n    import os\nimport torch\n", []),
        ("import os\n# os.environ is not set\nprint({'OMP': 1})\nimport torch\n", []),
        ("from ....... import nothing\nimport torch\n", []),
    ],
)
def test_names_that_are_set_before_torch(tmp_path: Path, text: str, names: list[str]) -> None:
    script = written(tmp_path / "script.py", text)
    assert variables_set_early(script) == names


SCRIPT = """
import os
os.environ["OMP_NUM_THREADS"] = "2"
import torch
import sys
print(torch.get_num_threads(), os.environ.get("TORCHINDUCTOR_CACHE_DIR"), "x" in sys.argv)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "threads"), [("", 2), *rarely(("1", 2), ("0", 1))])
def test_ranks_are_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, threads: int
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    # The agent must not inherit what an import of torch added to this process.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    words = ["--nproc-per-node", "2", "script.py", "x"]
    ended = execute(tmp_path, *AGENT, *words, FRESH=choice)
    assert ended.stdout == f"{threads} None True\n" * 2, ended.stderr
    notice = "each rank imports torch itself, because script.py sets OMP_NUM_THREADS earlier"
    assert (f"node agent: {notice}" in ended.stderr) == (not choice)
