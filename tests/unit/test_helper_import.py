"""`import distributed.torch` reads little; what saves and loads is imported when it is needed."""

import shutil
import sys
from pathlib import Path

import pytest
from agents import ROOT, run_program

pytestmark = pytest.mark.slow

MOST_FILES = 16
SCRIPT = """
import os, sys
import torch
{import_line}

def modules():
    return {{name for name in sys.modules if name.startswith(helper.__package__ + ".")}}

def save_and_load(folder):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    helper.save(folder, 3, model, optimizer)
    assert helper.load(folder, model, optimizer)["step"] == 3

before = modules()
"""
PLAIN = SCRIPT.format(import_line="from distributed import torch as helper")
BY_ITS_OWN_NAME = SCRIPT.format(
    import_line="from torch_launch_kit.distributed import torch as helper"
)
ENGINE = "checkpoint.one_call"
USERS_PACKAGE = "raise AssertionError('this is the package of the user, or Dask')\n"


def run(code: str, folder: Path, path: Path | str = ROOT) -> str:
    """Run code in a folder, with a PYTHONPATH; return what it prints."""
    command = [sys.executable, "-c", code]
    done = run_program(command, folder, PYTHONPATH=str(path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_reads_few_files_and_none_of_the_checkpoints(tmp_path: Path) -> None:
    code = PLAIN + "print(*{sys.modules[one].__file__ for one in before | {helper.__package__}})"
    read = {str(Path(file).relative_to(ROOT)) for file in run(code, tmp_path).split()}
    assert len(read) <= MOST_FILES
    assert "distributed/torch.py" in read and "distributed/models.py" in read
    assert [file for file in read if file.startswith("distributed/checkpoint/")] == []


def test_it_does_not_matter_how_a_script_names_save(tmp_path: Path) -> None:
    code = """
import copy, inspect, pickle
import distributed.torch as dt
kept = dt.save
assert [*inspect.signature(kept).parameters][:4] == ["folder", "step", "model", "optimizer"]
assert "All ranks must call this" in dt.load.__doc__
assert pickle.loads(pickle.dumps(kept)) is copy.deepcopy(kept) is kept

from distributed.torch import *
from distributed.torch import load as by_name
assert save is kept and load is by_name is dt.load and {*dt.__all__} <= {*globals()}

try:
    dt.sav
except AttributeError as error:
    assert str(error) == "module 'distributed.torch' has no attribute 'sav'"
else:
    raise AssertionError
"""
    run(code, tmp_path)


def test_finish_imports_nothing_if_nothing_was_saved(tmp_path: Path) -> None:
    code = "import atexit\natexit.register(lambda: print(modules() - before))\nhelper.finish()"
    assert run(PLAIN + code, tmp_path) == "set()\n"


def test_the_first_save_finds_our_files_from_another_working_directory(tmp_path: Path) -> None:
    """The script names our folder relative to where it starts; a package of its own is where it
    goes."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "distributed" / "checkpoint").mkdir(parents=True)
    for folder in ("distributed", "distributed/checkpoint"):
        (elsewhere / folder / "__init__.py").write_text(USERS_PACKAGE)
    (tmp_path / "kit").symlink_to(ROOT)
    start = 'import sys\nsys.path[:0] = ["kit"]\n'
    end = 'os.chdir("elsewhere")\nsys.path[:] = ["", *sys.path[1:]]\nsave_and_load("run")\n'
    run(start + PLAIN + end, tmp_path, path="")
    assert (elsewhere / "run/latest").resolve().name == "step-3"


def test_a_package_of_the_user_with_the_same_name_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / "__init__.py").write_text("whose = 'mine'\n")
    code = """
import distributed
assert distributed.whose == "mine"
sys.path.remove(os.environ["PYTHONPATH"])
save_and_load("run")
assert not hasattr(distributed, "checkpoint")
"""
    run(BY_ITS_OWN_NAME + code, tmp_path, path=ROOT / "launcher/importable")


def test_once_the_ranks_have_joined_a_save_needs_none_of_our_files(tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    shutil.copytree(
        ROOT / "distributed", kit / "distributed", ignore=shutil.ignore_patterns("__pycache__")
    )
    code = f"""
import shutil
helper.init_distributed()
assert helper.__package__ + ".{ENGINE}" in sys.modules
shutil.rmtree({str(kit)!r})
sys.modules["distributed"] = torch  # as if the script had imported Dask's
save_and_load("run")
"""
    run(PLAIN + code, tmp_path, path=kit)
