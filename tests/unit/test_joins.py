"""A rank that stays away and one given twice, under launchers that are not ours."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from agents import ROOT, run_program
from ports import free_port

pytestmark = pytest.mark.long

PYTHON = [sys.executable, "-m"]
OPTIONS = ["--no-python", "--nproc-per-node=3", f"--master-port={free_port()}"]
LAUNCHERS = {
    "torchrun": [*PYTHON, "torch.distributed.run", *OPTIONS],
    "launch": [*PYTHON, "torch.distributed.launch", "--use-env", *OPTIONS],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3"],
}
# Rank 2 of three leaves before it joins, or is told that it is rank 1.
WRONG = """
own=OMPI_COMM_WORLD_
[[ ${OMPI_COMM_WORLD_RANK:-} ]] || own=
declare -n rank=${own}RANK
if ((rank == 2)); then
  [[ $1 == twice ]] || exit 0
  export "${own}RANK=1" "${own}LOCAL_RANK=1"
fi
shift
exec "$@"
"""
SAID = {
    "missing": r"1 of 3 ranks did not join at \S+ within 10 s: rank 2; .* \[node-missing\]",
    "twice": r"rank 1 runs twice, on .* \[duplicate-node-rank\]",
}


@pytest.mark.parametrize("fault", SAID)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_that_joins_says_the_same_line(
    tmp_path: Path, launcher: str, fault: str
) -> None:
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun here")
    train = [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "config/local3.yaml")]
    train += ["train.max_steps=2", "model.layers=1", "distributed.join_timeout=10"]
    command = [*LAUNCHERS[launcher], "bash", "-c", WRONG, "bash", fault, *train]
    done = run_program(command, tmp_path, OMP_NUM_THREADS="1")
    lines = re.findall(r"^train\.py: .*", done.stderr, re.MULTILINE)
    assert len(lines) == (2 if fault == "missing" else 3) and len({*lines}) == 1, done.stderr
    assert re.fullmatch(f"train\\.py: {SAID[fault]}", lines[0])
    assert "Traceback" not in done.stderr.partition("torch/distributed")[0]
    codes = re.findall(r"exitcode +: (\d+) ", done.stderr)  # torchrun's own is 1
    assert codes or launcher == "mpirun"
    assert {*(codes or [str(done.returncode)])} == {"2"}, done.stderr
