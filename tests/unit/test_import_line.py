"""One line imports the helper under every launcher, without PYTHONPATH, and shadows nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agents import ROOT, execute, rarely

pytestmark = pytest.mark.slow

# A user's own packages have the names of ours.
SCRIPT = """
import distributed, launcher
from torch_launch_kit.distributed import torch as helper
from torch_launch_kit.distributed.checkpoint import Saver

assert distributed.IS_MINE and launcher.IS_MINE
for name in ("training", "train", "scripts"):  # the kit's others do not come with it
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)
env = helper.init_distributed()
told = helper.gather_json([env.rank, helper.__name__])
helper.print_main(told)
helper.finish()
"""
FRESH = 'import os\nos.environ["OMP_NUM_THREADS"] = "1"\nimport torch\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of a user's, with packages of the names of ours."""
    for name in ("distributed", "launcher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("IS_MINE = True\n")
    (tmp_path / "own.py").write_text(SCRIPT)
    (tmp_path / "fresh.py").write_text(FRESH + SCRIPT)
    return tmp_path


def run(project: Path, *command: str | Path, **variables: Any) -> str:
    return execute(project, *command, OMP_NUM_THREADS="1", **variables).stdout


TOLD = str([[rank, "torch_launch_kit.distributed.torch"] for rank in (0, 1)])
SCRIPTS = ROOT / "scripts"
COMMANDS = {
    "forked": (["launch.sh", "--nproc-per-node=2", "own.py"], {}),
    "module": (["launch.sh", "--nproc-per-node=2", "-m", "own"], {}),
    "executed": (["launch.sh", "--nproc-per-node=2", "fresh.py"], {}),
    "config": (["ssh/launch_singlenode.sh", "-", "2"], {"TRAIN_SCRIPT": "own.py"}),
}


@pytest.mark.parametrize("how", ["forked", "executed", *rarely("module", "config")])
def test_a_script_finds_the_helper_beside_packages_of_its_own(project: Path, how: str) -> None:
    words, variables = COMMANDS[how]
    out = run(project, SCRIPTS / words[0], *words[1:], **variables)
    assert TOLD in out.splitlines()


def test_the_folder_comes_last(project: Path) -> None:
    (project / "own.py").write_text("import sys\nprint(sys.path[-1])\n")
    out = run(project, SCRIPTS / "launch.sh", "--nproc-per-node=1", "own.py", PYTHONPATH="/mine")
    assert out == f"{ROOT}/launcher/importable\n"


def test_a_copy_in_the_users_repository_is_found_as_well(project: Path) -> None:
    run(project, "bash", SCRIPTS / "lib/init.sh", project)
    launch = project / "launch-kit/scripts/launch.sh"
    assert TOLD in run(project, launch, "--nproc-per-node=2", "own.py").splitlines()
