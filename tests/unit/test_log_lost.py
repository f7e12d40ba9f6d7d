"""A log that is lost during a run does not change its result; it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agents import AGENT, PATIENCE_S, ROOT

SMALL = ["model.layers=1", "model.width=16", "model.context=16", "train.batch_size=2"]
STEPS = ["train.max_steps=400", "train.log_every=5", "train.eval_every=0", "checkpoint.every=20"]


def put_a_file_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def remove_the_lock(folder: Path) -> None:
    (folder / "lock").unlink()


@pytest.mark.long
@pytest.mark.parametrize(
    "lose",
    [shutil.rmtree, put_a_file_in_its_place, remove_the_lock],
)
def test_training_and_saving_go_on(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    script = ROOT / "scripts/ssh/launch_singlenode.sh"
    command = [str(script), str(ROOT / "config/local3.yaml"), "2", *SMALL, *STEPS]
    environ = {**os.environ, "PYTHON": sys.executable, "RUN_ID": "r"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as run:
        while run.poll() is None and not (tmp_path / "checkpoints/r/latest").is_symlink():
            time.sleep(0.01)
        lose(tmp_path / "logs/r")
        _, err = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, err.decode()
    assert (tmp_path / "checkpoints/r/step-400").is_dir()
    assert b"[log-lost]" in err and b"Traceback" not in err
    by_train, by_agent = err.count(b"the run goes on [log-lost]"), err.count(b"[log-lost]")
    assert by_train <= 1 and by_agent <= 2  # by rank 0 and by the agent, once each


@pytest.mark.slow
def test_a_rank_that_then_fails_is_still_named_with_its_error(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text(
        "import os, shutil\n"
        "shutil.rmtree(os.path.join(os.environ['LOG_DIR'], os.environ['RUN_ID']))\n"
        "raise ValueError('batch 120 holds no samples')\n"
    )
    done = subprocess.run(
        [*AGENT, "--log-dir", str(tmp_path / "logs"), "--rdzv-id", "r", str(script)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    block = done.stderr[done.stderr.index("FAILED   rank 0 ") :]
    assert "cause    ValueError: batch 120 holds no samples" in block
    assert "During handling" not in done.stderr
