"""All kinds of runs in an environment with only torch; train.py's, with torch and PyYAML."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch_alone
import yaml
from agents import GLOO_SAYS, ROOT, run_program

pytestmark = pytest.mark.slow
LAUNCH = [ROOT / "scripts/launch.sh", "--nproc-per-node=2"]
RUN_ID = f"alone-{os.getpid()}"  # a run's port is derived from it
PLAN = re.compile(r"\A(?:[a-z].*\n)*logs  .*\n")
RAISES = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("boom")
time.sleep(600)
"""


@dataclass
class Place:
    """A folder, and the Python of its runs."""

    folder: Path
    python: Path

    def run(self, *command: object, **variables: str) -> tuple[int, str, str]:
        """Return the exit code, stdout, and what stderr shows after the plan."""
        own = {"PYTHON": str(self.python), "RUN_ID": RUN_ID, "OMP_NUM_THREADS": "1"}
        done = run_program(command, self.folder, **own, **variables)
        return done.returncode, GLOO_SAYS.sub("", done.stdout), PLAN.sub("", done.stderr)

    def ours(self, module: str, *words: object) -> tuple[int, str, str]:
        """Run one of our modules, by its name; torch's own message about NumPy is omitted."""
        code, out, err = self.run(self.python, "-m", module, *words, PYTHONPATH=str(ROOT))
        return code, out, re.sub(r".*UserWarning: Failed to initialize NumPy.*\n.*\n", "", err)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torch_alone.make(tmp_path_factory.mktemp("alone") / "environment")


@pytest.fixture(scope="session")
def with_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torch_alone.make(tmp_path_factory.mktemp("with-yaml") / "environment", "PyYAML")


@pytest.fixture
def place(tmp_path: Path, python: Path) -> Place:
    return Place(tmp_path, python)


def test_nothing_else_is_there(place: Place) -> None:
    lacking = ("yaml", "numpy", "pydantic", "rich", "psutil", "matplotlib", "packaging")
    script = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n)])"
    code, out, err = place.run(place.python, "-c", script, "torch", "json", *lacking)
    assert (code, out, err) == (0, "torch json\n", "")


@pytest.mark.another_torch("launch")
def test_every_module_of_the_launcher_and_the_helper_can_be_imported(place: Place) -> None:
    files = [file for wing in ("launcher", "distributed") for file in (ROOT / wing).rglob("*.py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    (place.folder / "each.py").write_text(
        "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    )
    assert place.ours("each", *names) == (0, "", "")


def test_an_example_ends_well_and_its_checkpoint_is_whole(place: Place) -> None:
    command = [*LAUNCH, ROOT / "examples/resumable.py", "100"]
    code, out, err = place.run(*command)
    assert (code, err) == (0, "") and re.fullmatch(r"step 100  loss [\d.]+\n", out)
    folder = place.folder / "checkpoints" / RUN_ID
    code, out, err = place.ours("distributed.checkpoint", "verify", folder)
    assert (code, out, err) == (0, "step-100       intact\n", "")
    code, out, err = place.ours("distributed.checkpoint", "hash", folder)
    assert code == 0 and re.fullmatch(r"[0-9a-f]{64}\n", out) and err == ""
    assert place.run(*command) == (0, "", "")  # it has no steps left


@pytest.mark.another_torch("failure block")
def test_the_block_of_an_error(place: Place) -> None:
    (place.folder / "raises.py").write_text(RAISES)
    code, out, err = place.run(*LAUNCH, "raises.py")
    assert (code, out) == (1, "")
    head = r"FAILED   rank 1 \(local rank 1, \S+\) \d+ s after the start +\[rank-error\]\n"
    assert re.match(rf"{head}cause    ValueError: boom\n         raises.py:4 in <module>\n", err)
    start = ROOT / "scripts/lib/start.py"
    assert place.run(place.python, start, "launcher.explain.main", RUN_ID) == (0, err, "")


# --- train.py, with torch and PyYAML ------------------------------------------------------------

SMALL = ("train.max_steps=4", "train.eval_every=2", "train.log_every=1", "model.layers=1")
NOTES = [
    "tensorboard is not installed: no event files",
    "matplotlib is not installed: no loss plot",
]


@pytest.fixture
def yaml_place(tmp_path: Path, with_yaml: Path) -> Place:
    return Place(tmp_path, with_yaml)


def missing(said: str) -> list[str]:
    """Return the lines about packages that are not installed, apart from torch's about NumPy."""
    told = re.compile("not installed|No module named '(?!numpy)|Traceback")
    return [line for line in said.splitlines() if told.search(line)]


def test_pyyaml_is_enough_for_train_py(yaml_place: Place) -> None:
    words = [ROOT / "scripts/run_ddp.sh", "-n", "2", *SMALL, "checkpoint.snapshot_every=2"]
    code, out, err = yaml_place.run(*words)
    assert (code, missing(out)) == (0, NOTES), err
    assert "warning" not in err and "done       step 4 " in out
    folder = yaml_place.folder / "logs" / RUN_ID
    metrics = (folder / "metrics.jsonl").read_text()
    assert "validation_loss" in metrics
    assert not (folder / "loss.png").exists() and not (folder.parent / "tensorboard").exists()
    assert yaml.safe_load((folder / "config.yaml").read_text())["tracking"] == ["tensorboard"]
    code, out, err = yaml_place.run(*words, "train.max_steps=6")  # resumed
    assert code == 0 and "done       step 6 (2 steps this session" in out, err


def test_what_is_asked_for_and_missing_is_a_warning(yaml_place: Place) -> None:
    words = (*SMALL, "train.max_steps=1", "tracking=tensorboard")
    config = ROOT / "config/local3.yaml"
    code, _, err = yaml_place.run(
        yaml_place.python, ROOT / "train.py", "--config", config, *words, LOG_LEVEL="WARNING"
    )
    told = "tracker tensorboard failed (No module named 'tensorboard'); the run continues"
    assert (code, missing(err)) == (0, [f"{told} [log-lost]"])


def test_a_picture_needs_matplotlib_and_says_so(yaml_place: Place) -> None:
    folder = yaml_place.folder / "logs/mine"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    code, out, err = yaml_place.ours("training.plot", "mine")
    python = yaml_place.python
    cure = f"run {python} -m pip install matplotlib"
    assert (code, out, err) == (3, "", f"plot: {python} lacks matplotlib; {cure}\n")


def test_without_pyyaml_the_launcher_says_what_to_install(place: Place) -> None:
    code, out, err = place.run(ROOT / "scripts/run_ddp.sh", "-n", "2", *SMALL)
    cure = f"run {place.python} -m pip install PyYAML"
    assert (code, out) == (3, "")
    assert err == f"train.py: {place.python} lacks PyYAML; {cure} [env-missing]\n"
