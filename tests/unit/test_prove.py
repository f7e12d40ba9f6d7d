"""`make prove`: which parts it runs."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROVE = str(Path(__file__).parents[1] / "prove.py")


@pytest.fixture(scope="module")
def prove() -> dict[str, Any]:
    return runpy.run_path(PROVE)


def test_all_parts_where_none_is_named(prove: dict[str, Any]) -> None:
    assert prove["read_arguments"]([]) == ([*prove["PARTS"]], 20)
    assert prove["read_arguments"](["--times", "5", "kills", "ssh"]) == (["kills", "ssh"], 5)


def test_an_unknown_part_is_refused(
    prove: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        prove["read_arguments"](["kill"])
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith("there is no part kill; PART=list shows them\n")


@pytest.mark.long
def test_no_part_reads_from_the_terminal(tools: Path) -> None:
    (tools / "bats").write_text("#!/bin/sh\necho 1..1\nreadlink /proc/self/fd/0\n")
    (tools / "bats").chmod(0o755)
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['run_bats']('scripts', 'x', 1))"
    command = [sys.executable, "-c", code, PROVE]
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        command, stdin=subprocess.PIPE, capture_output=True, text=True, env={**os.environ, **path}
    )
    assert done.stdout == "('/dev/null', True)\n", done.stderr


FOUR_PARTS = """
import runpy, subprocess, sys
from pathlib import Path
module = runpy.run_path(sys.argv[1])["run_parts"].__globals__
def wait(times):
    subprocess.run(["sh", "-c", "echo begun; exec sleep 471"])
    return "", True
places = {"one": "beside", "two": "beside", "three": "cluster", "four": "cluster"}
module["PARTS"] = {name: module["Part"](name, "", wait, place) for name, place in places.items()}
module["PROOFS"] = Path(sys.argv[2])
module["run_parts"]([*places], 1)
"""


@pytest.mark.long
def test_after_ctrl_c_no_other_part_begins(tmp_path: Path) -> None:
    page = tmp_path / "proofs.md"
    page.write_text("# Proofs\n")
    proofs = subprocess.Popen(
        [sys.executable, "-c", FOUR_PARTS, PROVE, page],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        start_new_session=True,
    )
    assert proofs.stdout is not None
    with proofs:
        assert [proofs.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        os.killpg(proofs.pid, signal.SIGINT)
        said = proofs.stdout.read()
    assert "begun" not in said
    assert proofs.returncode == -signal.SIGINT
