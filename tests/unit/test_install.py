"""The helper is one import, installed or not, and shadows no module; what pip installs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from agents import PATIENCE_S, ROOT, execute, rarely

LEFT_OUT = (".*", "logs", "checkpoints", "tests", "bench", "__pycache__", "*.egg-info", "build")
PYPROJECT = (ROOT / "pyproject.toml").read_text()

# A user's own packages have the same names as ours.
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


TOLD = str([[rank, "torch_launch_kit.distributed.torch"] for rank in (0, 1)])


def test_every_entry_script_is_a_command() -> None:
    section = PYPROJECT.partition("[project.scripts]")[2].partition("\n[")[0]
    commands = re.findall(
        r'^"([\w.-]+)" = "torch_launch_kit.launcher.command:main"$', section, re.M
    )
    scripts = (ROOT / "scripts").glob("**/*.sh")
    entries = [path.name for path in scripts if path.parent.name != "lib"]
    tools = {"explain.sh": "launch-explain", "checkpoint.sh": "launch-checkpoint"}  # clearer names
    assert sorted(commands) == sorted(["launch", *(tools.get(name, name) for name in entries)])


def test_what_it_needs_is_what_the_project_runs_with() -> None:
    lists = re.findall(r"^(?:dependencies|all) = (\[.*\])$", PYPROJECT, re.M)
    needed, extras = (
        {re.split(r"[<>=]", text)[0] for text in ast.literal_eval(one)} for one in lists
    )
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "requirements.txt").read_text(), re.M)
    assert needed == {"torch", "PyYAML"}
    assert needed | extras == set(pinned)


def test_every_folder_of_python_is_installed() -> None:
    section = PYPROJECT.partition("\npackages = ")[2].partition("\n]")[0]
    wings = ("distributed", "launcher", "training")
    folders = {
        file.parent.relative_to(ROOT) for one in wings for file in (ROOT / one).rglob("*.py")
    }
    names = {"torch_launch_kit", *(".".join(["torch_launch_kit", *f.parts]) for f in folders)}
    assert {*re.findall(r'"([\w.]+)"', section)} == names


def make_own_packages(folder: Path) -> None:
    """Create a user's packages with the same names as ours."""
    for name in ("distributed", "launcher"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("IS_MINE = True\n")


class Installed:
    """A virtual environment with the wheel and another project's package `distributed`."""

    def __init__(self, folder: Path) -> None:
        source, wheels, environment = folder / "source", folder / "wheels", folder / "environment"
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        options = ["--no-deps", "--no-index"]
        build = [*pip, "wheel", *options, "--no-build-isolation", "-w", str(wheels), str(source)]
        subprocess.run(build, check=True)
        (self.wheel,) = wheels.iterdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        self.bin = environment / "bin"
        into = ["--python", str(self.bin / "python"), "install", *options]
        subprocess.run([*pip, *into, str(self.wheel)], check=True)
        (site,) = environment.glob("lib/*/site-packages")
        make_own_packages(site)
        (site / "torch.pth").write_text(sysconfig.get_path("purelib"))  # finds the installed torch

    def run(
        self, folder: Path, command: str, *words: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        kept = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
        return subprocess.run(
            [self.bin / command, *words],
            cwd=folder,
            env={**kept, "PATH": os.defpath, "OMP_NUM_THREADS": "1", **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"))


@pytest.mark.slow
def test_a_wheel_holds_one_package(installed: Installed) -> None:
    assert re.fullmatch(r"torch_launch_kit-[\d.]+-py3-none-any\.whl", installed.wheel.name)
    (site,) = installed.bin.parent.glob("lib/*/site-packages")
    ours = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    assert ours == {"torch_launch_kit", "distributed", "launcher", "torch.pth"}
    package = site / "torch_launch_kit"
    assert (package / "distributed/py.typed").exists()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert pages and {page.name for page in (package / "docs").glob("*.md")} == pages
    for script in package.glob("scripts/**/*.sh"):
        is_executable = os.access(script, os.X_OK)
        assert is_executable == (script.parent.name != "lib"), script


@pytest.mark.slow
def test_a_script_of_the_users_finds_the_helper_and_the_other_distributed(
    installed: Installed, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    result = installed.run(tmp_path, "launch_singlenode.sh", "-", "2", TRAIN_SCRIPT="own.py")
    assert (result.returncode, result.stdout) == (0, f"{TOLD}\n"), result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "own.py"]


@pytest.mark.slow
def test_a_training_runs_in_an_empty_folder_and_is_resumed_by_the_command(
    installed: Installed, tmp_path: Path
) -> None:
    words = ["-n", "2", "train.max_steps=2", "model.layers=1", "train.eval_every=0"]
    result = installed.run(tmp_path, "run_ddp.sh", *words, RUN_ID="mine")
    assert result.returncode == 0, result.stderr
    command = rf"(OMP_NUM_THREADS=1 )?{installed.bin}/run_ddp.sh -n 2"
    assert re.search(f"resume     RUN_ID=mine {command}", result.stdout)
    tool = ["-m", "torch_launch_kit.distributed.checkpoint", "ls", "checkpoints/mine"]
    assert installed.run(tmp_path, "python", *tool).stdout.startswith("step-2 ")
    status = installed.run(tmp_path, "run_ddp.sh", "--status")
    assert status.stdout.startswith("mine  ended, code 0  ")


TOOLS = ("distributed.checkpoint", *(f"training.{n}" for n in ("sample", "prepare", "plot")))


@pytest.mark.slow
@pytest.mark.parametrize("tool", [TOOLS[0], *rarely(*TOOLS[1:])])
def test_every_tool_runs(installed: Installed, tmp_path: Path, tool: str) -> None:
    result = installed.run(tmp_path, "python", "-m", f"torch_launch_kit.{tool}", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"python -m {tool} " in result.stdout


@pytest.mark.slow
def test_the_commands_tell_their_version_and_their_help(
    installed: Installed, tmp_path: Path
) -> None:
    version = installed.wheel.name.split("-")[1]
    for name in ("run_ddp.sh", "slurm_train.sh"):
        assert installed.run(tmp_path, name, "--version").stdout == f"{name} {version}\n"
        assert f"usage: {'sbatch [SBATCH OPTIONS] ' * (name[0] == 's')}scripts/" in (
            installed.run(tmp_path, name, "--help").stdout
        )
    section = installed.run(tmp_path, "launch-explain", "rank-stuck")
    assert (section.returncode, section.stdout.split("\n")[0]) == (0, "## rank-stuck")


@pytest.mark.slow
def test_an_installed_script_finds_its_python_by_itself(
    installed: Installed, tmp_path: Path
) -> None:
    (script,) = installed.bin.parent.glob("lib/*/site-packages/*/scripts/ssh/launch_singlenode.sh")
    result = installed.run(tmp_path, str(script), "--dry-run", "-", "1", TRAIN_SCRIPT=__file__)
    assert result.returncode == 0, result.stderr
    assert f" {installed.bin}/python " in result.stdout


# --- in a checkout ------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder, with packages of the same names as ours."""
    make_own_packages(tmp_path)
    (tmp_path / "own.py").write_text(SCRIPT)
    (tmp_path / "fresh.py").write_text(FRESH + SCRIPT)
    return tmp_path


def run(project: Path, *command: str | Path, **variables: Any) -> str:
    return execute(project, *command, OMP_NUM_THREADS="1", **variables).stdout


SCRIPTS = ROOT / "scripts"
COMMANDS = {
    "forked": (["launch.sh", "--nproc-per-node=2", "own.py"], {}),
    "module": (["launch.sh", "--nproc-per-node=2", "-m", "own"], {}),
    "executed": (["launch.sh", "--nproc-per-node=2", "fresh.py"], {}),
    "config": (["ssh/launch_singlenode.sh", "-", "2"], {"TRAIN_SCRIPT": "own.py"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forked", "executed", *rarely("module", "config")])
def test_a_script_finds_the_helper_beside_packages_of_its_own(project: Path, how: str) -> None:
    words, variables = COMMANDS[how]
    out = run(project, SCRIPTS / words[0], *words[1:], **variables)
    assert TOLD in out.splitlines()


@pytest.mark.slow
def test_the_folder_comes_last(project: Path) -> None:
    (project / "own.py").write_text("import sys\nprint(sys.path[-1])\n")
    out = run(project, SCRIPTS / "launch.sh", "--nproc-per-node=1", "own.py", PYTHONPATH="/mine")
    assert out == f"{ROOT}/launcher/importable\n"


@pytest.mark.slow
def test_a_copy_in_the_users_repository_is_found_as_well(project: Path) -> None:
    run(project, "bash", SCRIPTS / "lib/init.sh", project)
    launch = project / "launch-kit/scripts/launch.sh"
    assert TOLD in run(project, launch, "--nproc-per-node=2", "own.py").splitlines()
