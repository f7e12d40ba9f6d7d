"""The suite itself: what a test sets is undone, and a part that hangs is ended."""

from __future__ import annotations

import contextlib
import runpy
import shutil
import signal
from pathlib import Path

import pytest
from agents import ROOT, eventually, run_program

from distributed.stop_signals import STOP_SIGNALS


@pytest.mark.parametrize("turn", [1, 2])
def test_what_a_test_blocks_is_undone(turn: int) -> None:
    assert signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS) == set(), turn


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bats") is None, reason="bats is not installed")
def test_a_part_that_hangs_is_ended_and_counted(tmp_path: Path) -> None:
    """In a copy of the suite, whose checks of the code all pass."""
    for folder in ("tests/scripts", "tests/cluster", "bench", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    script = (ROOT / "tests/run.sh").read_text().replace("PART_LIMIT=3h", "PART_LIMIT=3s")
    passes = "#!/bin/sh\necho 1 passed\n"
    tools = {f"bin/{name}": passes for name in ("python", "shellcheck", "shfmt")}
    for name, text in {"tests/run.sh": script, **tools}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tests/scripts/one.bats").write_text("@test one {\n  sleep 600\n}\n")
    done = run_program([tmp_path / "tests/run.sh", "fast"], PYTHON=str(tmp_path / "bin/python"))
    *_, why, count = done.stdout.splitlines()
    assert why == "failed  fast-scripts: not done after 3s"
    assert count.endswith(" passed, 1 failed, 0 skipped")
    eventually(lambda: not any(is_in(one, tmp_path) for one in Path("/proc").glob("[0-9]*/cwd")))


def is_in(link: Path, folder: Path) -> bool:
    with contextlib.suppress(OSError):  # it has ended, or is none of ours
        return link.readlink() == folder
    return False


# --- make test-torch ------------------------------------------------------------------------------


BLOCK = """E   AssertionError: run        7
E     FAILED   rank 1 (local rank 1, vm) 0 s after the start       [rank-error]
E     cause    ValueError: batch 7 holds no samples
E   assert 1 == 0
"""
OLD = "this torch is too old to shard; install torch 2.6 or newer"
REFUSAL = f"E   AssertionError: run  7\nE     cause    {OLD} [unsupported]\nE   assert 2 == 0\n"


@pytest.mark.parametrize(
    ("errors", "cell"),
    [
        ([], "FAIL: no test ran"),
        (["", ""], "pass"),
        (["", BLOCK], "FAIL: ValueError: batch 7 holds no samples"),
        (["E   OSError: no place\n"], "FAIL: OSError: no place"),
        ([REFUSAL, REFUSAL], f"refused: {OLD}"),
        ([REFUSAL, ""], f"pass; refused: {OLD}"),
        ([REFUSAL, BLOCK], "FAIL: ValueError: batch 7 holds no samples"),
    ],
)
def test_a_cell_tells_what_its_tests_did(errors: list[str], cell: str) -> None:
    assert runpy.run_path(f"{ROOT}/tests/with_torch.py")["describe"](errors) == cell
