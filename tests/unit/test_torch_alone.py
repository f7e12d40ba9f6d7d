"""Runs of every kind where torch is installed, what torch requires, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import uuid
from pathlib import Path

import pytest
import torch
import torch_alone
from agents import PATIENCE_S, ROOT, rarely

from launcher.text import short_host_name

# A loop with the helper. It takes a snapshot at step 10; at step 12 comes what its argument names.
LOOP = """
import os, sys, time
from pathlib import Path

import torch

sys.path.insert(0, os.environ["KIT"])
from distributed import torch as helper
from distributed.checkpoint import Saver, State, gather_ranks, load, rng_state, set_rng_state

what = sys.argv[1]
strategy, form = ("fsdp", "sharded") if what == "sharded" else ("ddp", "full")
env = helper.init_distributed()
helper.seed_everything(0)
folder = Path("checkpoints", env.run_id)
saver = Saver(folder, keep_last=2, enabled=env.is_main, format=form)
module, saved = torch.nn.Linear(4, 2), load(folder)
if saved:
    module.load_state_dict(saved.model)
model = helper.setup_distributed_models(module, strategy=strategy)
optimizer = torch.optim.AdamW(model.parameters())
if saved:
    moments = saved.optimizer
    if form == "sharded":
        from distributed import fsdp
        moments = fsdp.scatter(moments, optimizer)
    optimizer.load_state_dict(moments)
    set_rng_state(saved.ranks[env.rank]["rng"])
step = first = saved.progress["step"] if saved else 0
while step < 20:
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if what != "hang":
        helper.beat(step)
    if step in (10, 20):
        ranks = gather_ranks({"rng": rng_state()})
        weights, moments = helper.unwrap(model).state_dict(), optimizer.state_dict()
        keep = saver.snapshot if step == 10 else saver.save
        keep(step, State(weights, moments, {"step": step}, ranks))
    if step == 12 and what == "raise":
        if env.rank == 1:
            raise ValueError("boom")
        time.sleep(1000)
    if step == 12 and what == "hang" and env.rank == 1:
        time.sleep(1000)
    if step == 12 and env.is_main:
        print("under way", flush=True)
saver.wait()
helper.barrier()
helper.beat(saved=step)
if env.is_main:
    print(f"steps {first + 1} to {step}", flush=True)
helper.finish()
"""

pytestmark = pytest.mark.slow
LAUNCH = ROOT / "scripts/launch.sh"
GLOO_SAYS = re.compile(r"^\[Gloo\] Rank .*\n", re.M)  # on stdout, in some versions of torch


class Place:
    """A folder with the loop, and the environment that its runs are started from."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder, self.python = folder, python
        self.run_id = f"run-{uuid.uuid4().hex}"  # a run's port follows from it
        (folder / "loop.py").write_text(LOOP)

    def start(self, *command: str | Path, **variables: str) -> subprocess.Popen[str]:
        more = {"PYTHON": str(self.python), "KIT": str(ROOT), "RUN_ID": self.run_id}
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **more, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str | Path, **variables: str) -> tuple[int, str, str]:
        """Returns the exit code, stdout, and what stderr says after the plan."""
        process = self.start(*command, **variables)
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, GLOO_SAYS.sub("", out), self.told(err)

    def ours(self, module: str, *words: str | Path) -> tuple[int, str, str]:
        """Run a module of ours, by its name; torch's own word on NumPy is left out."""
        code, out, err = self.run(self.python, "-m", module, *words, PYTHONPATH=str(ROOT))
        return code, out, re.sub(r".*UserWarning: Failed to initialize NumPy.*\n.*\n", "", err)

    def told(self, err: str) -> str:
        """Cut off the plan, and name what differs between two runs."""
        err = re.sub(r"\A(?:[a-z].*\n)*logs  .*\n", "", err)
        err = re.sub(rf"(OMP_NUM_THREADS=1 )?PYTHON={self.python} ", "", err)  # the resume line's
        err = err.replace(str(self.folder), "HERE").replace(self.run_id, "RUN")
        err = err.replace(str(ROOT / "scripts"), "scripts")
        err = re.sub(rf"\b{re.escape(short_host_name())}\b", "HOST", err)
        err = re.sub(r"\bon port \d+", "on port P", err)
        err = re.sub(r"^stacks   default_pg: .*\n", "", err, flags=re.M)  # some torchs record gloo
        err = re.sub(r"(?<=\.py:)\d+(?= in )|(?<=\.log:)\d+", "N", err)
        return re.sub(r"\b\d+(?:\.\d+)? (s\b|%)", r"N \1", err)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torch_alone.make(tmp_path_factory.mktemp("alone") / "environment")


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


def launch(place: Place, what: str, *options: str, **variables: str) -> tuple[int, str, str]:
    words = ["--nproc-per-node=2", *options, "loop.py", what]
    return place.run(LAUNCH, *words, **variables)


@pytest.mark.parametrize("what", ["full", *rarely("sharded")])
def test_a_run_that_ends_well_and_its_checkpoint(place: Place, what: str) -> None:
    assert launch(place, what) == (0, "under way\nsteps 1 to 20\n", "")
    folder = place.folder / "checkpoints" / place.run_id
    code, out, err = place.ours("distributed.checkpoint", "verify", folder)
    assert (code, out, err) == (0, "step-20        intact\n", "")
    code, out, err = place.ours("distributed.checkpoint", "hash", folder)
    assert code == 0 and re.fullmatch(r"[0-9a-f]{64}\n", out) and err == ""
    assert launch(place, what) == (0, "steps 21 to 20\n", "")


@pytest.mark.another_torch("failure block")
def test_the_block_of_an_error(place: Place) -> None:
    code, out, err = launch(place, "raise")
    assert (code, out) == (1, "")
    assert err == (
        "node agent: step 10 was only in memory; it is now saved in HERE/checkpoints/RUN\n"
        "FAILED   rank 1 (local rank 1, HOST) N s after the start, at step 12       [rank-error]\n"
        "cause    ValueError: boom\n"
        "         loop.py:N in <module>\n"
        "code     1\n"
        "others   1 rank was stopped by the launcher; nothing is left running\n"
        "log      logs/RUN/node_0.log:N\n"
        "resume   RUN_ID=RUN scripts/launch.sh --nproc-per-node=2 loop.py raise"
        "     (from step 10)\n"
        "see      TROUBLESHOOTING.md#rank-error\n"
    )
    block = err[err.index("FAILED") :]
    code, out, err = place.ours("launcher.explain", place.run_id)
    assert (code, place.told(out), err) == (0, block, "")
    (place.folder / "logs" / place.run_id / "failure.txt").unlink()
    code, out, err = place.ours("launcher.explain", place.run_id)
    assert (code, err) == (0, "")
    assert place.told(out) == (
        "FAILED   rank 1       [rank-error]\n"
        "cause    ValueError: boom\n"
        "         loop.py:N in <module>\n"
        "log      logs/RUN/node_0.log:N\n"
        "see      TROUBLESHOOTING.md#rank-error\n"
    )


@pytest.mark.another_torch("hang")
def test_a_hang_is_named_with_all_stacks(place: Place) -> None:
    code, _, err = launch(place, "hang", HANG_SECONDS="12")
    assert code == 137
    assert err == (
        "node agent: step 10 was only in memory; it is now saved in HERE/checkpoints/RUN\n"
        "FAILED   rank 1 (local rank 1, HOST) N s after the start, at step 12       [rank-stuck]\n"
        "cause    no sign of life for N s; the limit, HANG_SECONDS, is N s\n"
        "         loop.py:N in <module>\n"
        "stacks   rank 0: torch/autograd/graph.py:N in _engine_run_backward"
        " < loop.py:N in <module>\n"
        "stacks   rank 1: loop.py:N in <module>\n"
        "code     137 (SIGKILL)\n"
        "others   1 rank was stopped by the launcher; nothing is left running\n"
        "log      logs/RUN/failures/rank_1.stack\n"
        "resume   RUN_ID=RUN HANG_SECONDS=12 scripts/launch.sh --nproc-per-node=2 loop.py hang"
        "     (from step 10)\n"
        "see      TROUBLESHOOTING.md#rank-stuck\n"
    )


@pytest.mark.long
def test_the_self_test(place: Place) -> None:
    command = ROOT / "scripts/test_distributed.sh"
    code, out, err = place.run(command, "2", "--quick", "--json", "told.json")
    assert (code, err) == (0, "")
    measured = re.sub(r"[\d.]+ ([GM]B/s|m?s|GFLOP/s)", "N", place.told(out))
    assert re.sub(" +", " ", measured.replace(torch.__version__, "VERSION")) == (
        "host rank device torch matrix product\n"
        "HOST 0 cpu VERSION N\n"
        "HOST 1 cpu VERSION N\n"
        "\n"
        "collective size time algbw busbw\n"
        "all-reduce 1 KiB N N N\n"
        "all-reduce 64 KiB N N N\n"
        "all-reduce 1 MiB N N N\n"
        "all-reduce 16 MiB N N N\n"
        "\n"
        "PASS 2 ranks on 1 node, gloo: 19 checks, all-reduce N busbw at 16 MiB, N s\n"
    )
    assert json.loads((place.folder / "told.json").read_text())["passed"]
