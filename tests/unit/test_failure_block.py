"""The failure block and the stopped line: how they are printed, kept, and found again in a log."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.failure import Failure
from launcher.failure_block import find_end, find_kept, print_outcome
from launcher.outcome import Outcome
from launcher.text import print_row

ERROR = Failure("rank-error", "ValueError: ü\nmore", 1, "node2", 1, 1000.5, rank=5, local_rank=1)
END = Outcome(code=1, failure=ERROR, lost_peer=6, stopped=1, started=986.0, run_id="r1")


@pytest.mark.parametrize(
    ("end", "first"),
    [
        (END, "FAILED   rank 5 (local rank 1, node2) 14 s after the start"),
        (replace(END, code=143, failure=None), "stopped  by SIGTERM (code 143); nothing"),
        (
            replace(END, code=75, failure=None, signum=1),
            "stopped  by SIGHUP after saving a checkpoint (code 75); nothing",
        ),
        (replace(END, code=0, failure=None), ""),
    ],
)
def test_the_launcher_prints_what_the_agent_would_and_keeps_it(
    end: Outcome, first: str, tmp_path: Path
) -> None:
    out = io.StringIO()
    print_outcome(end, out, tmp_path)
    assert out.getvalue().startswith(first) and bool(out.getvalue()) == bool(first)
    assert find_kept(tmp_path) == out.getvalue().rstrip("\n")
    assert [file.name for file in tmp_path.iterdir()] == ["failure.txt"] * bool(first)
    print_outcome(end, out, tmp_path / "gone")  # nothing that only tells ends a run


print_row("run", "r1    config/local3.yaml", plan := io.StringIO())
TOLD = plan.getvalue()


def printed(end: Outcome) -> str:
    out = io.StringIO()
    print_outcome(end, out, None)
    return out.getvalue()


@pytest.mark.parametrize(
    ("log", "is_end"),
    [
        (f"{TOLD}step 1\n{printed(END)}", True),
        (f"{TOLD}step 1\n{printed(END)}srun: error: n2: task 1: Exited with exit code 1\n", True),
        (f"{TOLD}step 1\r\n{printed(END)}".replace("\n", "\r\n"), True),
        (f"{TOLD}{printed(END)}".replace("FAILED  ", "\x1b[1;31mFAILED  \x1b[0m"), True),
        (f"{TOLD}{printed(END)}{TOLD}step 1\n", False),  # resumed, and not ended yet
        (f"{TOLD}{printed(END)}x.sh: run r1 is live; wait [run-is-live]\n", False),
        (f"{TOLD}step 1\nValueError: x\n", False),
        ("x" * (1 << 18) + f"\n{printed(END)}", True),
    ],
)
def test_the_block_that_ends_a_log_is_found(log: str, is_end: bool, tmp_path: Path) -> None:
    (tmp_path / "job.out").write_bytes(log.encode())
    assert find_end(tmp_path / "job.out") == (printed(END).rstrip("\n") if is_end else "")


def test_of_several_ends_the_last_counts(tmp_path: Path) -> None:
    stopped = printed(replace(END, code=75, failure=None))
    (tmp_path / "job.out").write_text(f"{TOLD}{printed(END)}{TOLD}{stopped}")
    assert find_end(tmp_path / "job.out") == stopped.rstrip("\n")
    assert stopped.startswith("stopped  after saving a checkpoint (code 75)")
