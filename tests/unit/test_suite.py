"""The suite itself: `make test` in a terminal, with a part in the background."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from distributed.stop_signals import STOP_SIGNALS

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 180.0  # of silence, after which the suite is taken to hang
RUNNER = """import sys, time
try:
    print("running", flush=True)
    time.sleep(600)
except KeyboardInterrupt:  # which pytest heeds, too: it ends its tests, then itself
    time.sleep(1)
    sys.exit(2)
"""

pytestmark = [
    pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")
    for tool in ("bats", "script")
]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A copy of the suite with tests of its own, whose checks of the code all pass."""
    for folder in ("tests/scripts", "tests/cluster", "bench", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tests/run.sh", tmp_path / "tests")
    for name in ("python", "shellcheck", "shfmt"):
        tool = tmp_path / "bin" / name
        tool.write_text("#!/bin/sh\n[ ! -t 0 ] && echo 1 passed\n")
        tool.chmod(0o755)
    return tmp_path


def run_in_terminal(suite: Path, test: str, stop_at: bytes = b"") -> list[str]:
    """Run `make test-fast` there with one test of the scripts; return the lines that it prints.

    Presses Ctrl-C once, at the text that is given.
    """
    (suite / "tests/scripts/one.bats").write_text(f"@test one {{\n  {test}\n}}\n")
    process, terminal = pty.fork()
    if process == 0:
        os.environ["PYTHON"] = str(suite / "bin/python")
        os.execv(suite / "tests/run.sh", ["run.sh", "fast"])
    shown, has_ended = b"", False
    while not has_ended and select.select([terminal], [], [], HANG_S)[0]:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # all have left the terminal
            has_ended = True
        if stop_at and stop_at in shown:
            os.write(terminal, b"\x03")
            stop_at = b""
    os.close(terminal)  # hangs up on those that hang
    os.waitpid(process, 0)
    assert has_ended, shown
    return shown.decode().splitlines()


@pytest.mark.parametrize("turn", [1, 2])
def test_what_a_test_blocks_is_undone(turn: int) -> None:
    assert signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS) == set(), turn


def test_no_test_uses_the_terminal(suite: Path) -> None:
    lines = run_in_terminal(suite, "script -qec true /dev/null && ! head -c 1 /dev/tty")
    assert lines[-1].endswith(" passed, 0 failed, 0 skipped"), lines


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_and_counted(suite: Path) -> None:
    script = suite / "tests/run.sh"
    script.write_text(script.read_text().replace("PART_LIMIT=3h", "PART_LIMIT=3s"))
    *_, why, count = run_in_terminal(suite, "sleep 600")
    assert why == "failed  fast-scripts: not done after 3s"
    assert count.endswith(" passed, 1 failed, 0 skipped")
    assert_nothing_runs_in(suite)


@pytest.mark.slow
def test_ctrl_c_is_repeated_to_a_part_that_lost_it(suite: Path) -> None:
    script = suite / "tests/run.sh"
    script.write_text(script.read_text().replace("AGAIN=10", "AGAIN=1"))
    (suite / "bin/bats").write_text(f"#!/bin/sh\ntrap 'trap - INT' INT\n{'sleep 600;' * 2}\n")
    (suite / "bin/bats").chmod(0o755)
    test_ctrl_c_ends_all_of_it(suite)


def test_ctrl_c_ends_all_of_it(suite: Path) -> None:
    (suite / "runner").write_text(RUNNER)
    runner = f"[ $2 != pytest ] || exec {sys.executable} runner\n"
    (suite / "bin/python").write_text(f"#!/bin/sh\n{runner}")
    *_, last, stopped = run_in_terminal(suite, "sleep 600", stop_at=b"running")
    assert (last, stopped) == ("running", "^C")
    assert_nothing_runs_in(suite)


def assert_nothing_runs_in(suite: Path) -> None:
    deadline = time.monotonic() + HANG_S
    while any(is_in(one, suite) for one in Path("/proc").glob("[0-9]*/cwd")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_in(link: Path, folder: Path) -> bool:
    with contextlib.suppress(OSError):  # it has ended, or is none of ours
        return link.readlink() == folder
    return False
