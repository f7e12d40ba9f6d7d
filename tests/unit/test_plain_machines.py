"""Machines, Pythons and shells as they are: closed and full streams, no HOME, plain locales."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from agents import PATIENCE_S, ROOT, rarely

LAUNCH = str(ROOT / "scripts/ssh/launch_singlenode.sh")
SHELLS = [
    "env -i PATH=/usr/bin:/bin PYTHON=$PYTHON TRAIN_SCRIPT=$TRAIN_SCRIPT"
    " PYTHONWARNINGS=error PYTHONINSPECT=1 {}",
]
RARER = [
    "{} <&- >&- 2>&-",
    "{} >/dev/full 2>/dev/full",
    "HOME=/nonexistent LC_ALL=C {}",
    "{} <&-",
    "{} >&-",
    "{} 2>&-",
    "{} >/dev/full",
    "env -u HOME {}",
]


@pytest.mark.slow
@pytest.mark.parametrize("how", [*SHELLS, *rarely(*RARER)])
def test_a_run_works_whatever_the_shell_gives_it(tmp_path: Path, how: str) -> None:
    script = tmp_path / "own.py"
    script.write_text("import pathlib\nprint('ü' * 3)\npathlib.Path('ran').touch()\n")
    command = how.format(shlex.join([LAUNCH, "-", "1"]))
    environ = {**os.environ, "PYTHON": sys.executable, "TRAIN_SCRIPT": str(script)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environ, capture_output=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "ran").exists()
    assert b"Traceback" not in done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_a_path_without_the_scripts_folder_will_do(tmp_path: Path) -> None:
    config = str(ROOT / "config/local3.yaml")
    environ = {**os.environ, "PYTHON": sys.executable, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [LAUNCH, "--dry-run", config, "2"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "scripts/lib/agent.py" in done.stdout
