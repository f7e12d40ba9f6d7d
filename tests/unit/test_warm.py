"""Ranks of an agent that was forked run as those of one that was executed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from agents import AGENT

pytestmark = pytest.mark.slow
THREADS = """
import threading
import torch

together = threading.Barrier(8)

def add():
    together.wait()
    torch.zeros(100_000).add_(1)  # large enough for torch's threads

threads = [threading.Thread(target=add) for _ in range(8)]
threading.excepthook = lambda args: print(args.exc_value, flush=True)
for one in threads:
    one.start()
for one in threads:
    one.join()
"""


def test_threads_of_a_rank_may_use_torch_at_the_same_time(tmp_path: Path) -> None:
    (script := tmp_path / "threads.py").write_text(THREADS)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*AGENT, "--nproc-per-node=6", str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
