"""train.py --evaluate: a checkpoint's validation metrics, without a run."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import execute
from launched import TRAIN, Work
from test_task import work as work

from distributed.checkpoint import State
from distributed.lock import lock_run
from training.evaluate import batch_size_of, find_folder
from training.settings import Checkpoint, Settings, Train

pytestmark = pytest.mark.slow


def read_facts(output: str) -> Any:
    (line,) = (line for line in output.splitlines() if line.startswith("{"))
    return json.loads(line)


def content_of(folder: Path) -> dict[Path, int]:
    return {one: one.lstat().st_mtime_ns for one in folder.rglob("*")}


@pytest.mark.parametrize("words", [(), ("distributed.strategy=fsdp", "checkpoint.format=sharded")])
def test_the_metrics_are_those_of_the_training(work: Work, words: tuple[str, ...]) -> None:
    """Each rank's BatchNorm has seen other samples; rank 0's is saved."""
    run_id = f"normed{len(words)}"
    words = ("task=points:Normed", *words)
    work.run(run_id, 2, *words, "train.max_steps=9")
    folders = [work.folder / kind / run_id for kind in ("checkpoints", "logs")]
    before = [content_of(folder) for folder in folders]
    names = ("loss", "accuracy")
    for step, name in ((9, run_id), (9, str(folders[0])), (8, f"{run_id}/step-8")):
        facts = read_facts(work.run("other", 2, *words, "--evaluate", name, "--json"))
        trained = {one: work.metrics(run_id, f"validation_{one}")[step] for one in names}
        assert facts == {
            "checkpoint": str(folders[0] / f"step-{step}"),
            "step": step,
            "samples": 37,
            "metrics": trained,
        }
    config = ["--config", work.config, words[0], "--evaluate", f"{run_id}/step-8"]
    alone = execute(work.folder, sys.executable, TRAIN, *config)
    loss, accuracy = trained.values()
    told = f"validation loss {loss:.4f}, accuracy {accuracy:.4f} (37 samples, "
    assert alone.stdout.startswith(told), alone
    assert [content_of(folder) for folder in folders] == before


def test_the_checkpoint_of_a_live_run_is_evaluated(work: Work) -> None:
    work.run("lives", 1, "train.max_steps=4")
    lock = lock_run(work.folder / "checkpoints/lives")
    config = ["--config", work.config, "--evaluate", "lives", "--json"]
    done = execute(work.folder, sys.executable, TRAIN, *config)
    assert read_facts(done.stdout)["step"] == 4, done.stderr
    with lock.committing():  # raises if the run no longer owns its folder
        pass


def test_what_cannot_be_evaluated_is_told_in_one_line(work: Work) -> None:
    work.run("whole", 1, "train.max_steps=4")
    runs = work.folder / "checkpoints"
    shutil.copytree(runs / "whole", runs / "damaged", symlinks=True)
    with (runs / "damaged/step-4/model.pt").open("ab") as file:
        file.write(b"more")

    def told(name: str, *words: str) -> str:
        output = work.run("refused", 2, *words, "--evaluate", name, code=2)
        assert "Traceback" not in output
        return next(line for line in output.splitlines() if line.startswith("train.py:"))

    assert "--evaluate 'nowhere': nowhere holds no checkpoint; give a checkpoint, or" in told(
        "nowhere"
    )
    assert "/step-4/model.pt has " in told("damaged") and (runs / "damaged/step-4").is_dir()
    different = told("whole", "task=points:Normed")
    assert "the checkpoint is from a different model, " in different and "(Error" in different
    assert "data: validation has no samples" in told("whole", "task=points:Blind")


def test_a_run_id_comes_before_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(train=Train(max_steps=1, batch_size=1), checkpoint=Checkpoint(dir="runs"))
    Path("mine").mkdir()
    assert find_folder("mine", settings) == Path("mine")
    Path("runs/mine").mkdir(parents=True)
    assert find_folder("mine", settings) == Path("runs/mine")
    assert find_folder(str(tmp_path / "mine"), settings) == tmp_path / "mine"


def test_batches_are_as_large_as_on_a_rank_of_the_run() -> None:
    train = Train(max_steps=1, global_batch_size=16, grad_accumulation=2)
    progress = {"global_batch_size": 16, "settings": {"train": train.as_tree()}}
    saved = State({}, {}, progress, [{}] * 4)
    assert batch_size_of(saved, train, 1) == 2
    assert batch_size_of(saved, Train(max_steps=1, batch_size=3), 1) == 3
    assert batch_size_of(State({}, {}, {"step": 1}), train, 1) == 8  # of another program
