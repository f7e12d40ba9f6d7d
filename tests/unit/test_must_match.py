"""What must be the same on every node."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.errors import Refused
from launcher.agent import join
from launcher.agent.nodes import checkin
from launcher.agent.torchrun_arguments import parse
from launcher.preflight.must_match import ARGUMENTS, describe_program
from launcher.wire.messages import NodeReport

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_what_is_the_same_is_told_without_torch() -> None:
    code = "import json; from launcher.preflight.must_match import versions"
    code += "; print(json.dumps(versions()))"
    ours = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    code = "import torch; print(torch.__version__)"
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(ours.stdout)["torch"] == theirs.stdout.strip()


def test_this_project_is_hashed_too(tmp_path: Path) -> None:
    for name in ("launcher", "distributed", "training"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc"))
    code = "from pathlib import Path; from launcher.preflight import must_match"
    code += "; print(must_match.hash_files([], Path())['this project'])"

    def hash_of(folder: Path) -> str:
        return subprocess.check_output([sys.executable, "-c", code], cwd=folder, text=True)

    assert hash_of(tmp_path) == hash_of(ROOT)
    (tmp_path / "training/tasks/__init__.py").write_text("changed")
    assert hash_of(tmp_path) != hash_of(ROOT)


def test_arguments_and_their_files_may_differ_without_a_preflight(tmp_path: Path) -> None:
    script, config = tmp_path / "own.py", tmp_path / "my.yaml"
    for file in (script, config):
        file.touch()
    words = [str(script), "--config", str(config), "a b"]
    told = describe_program(words, "", {})
    assert {*told} == {"this project", ARGUMENTS, "own.py", "my.yaml"}
    assert told[ARGUMENTS] == f"--config {config} 'a b'"
    told = describe_program(words, str(config), {"SKIP_PREFLIGHT": "1"})
    assert {*told} == {"this project", "own.py", "my.yaml"}  # the task's module
    other = [str(script), "--config", "other.yaml"]
    one, two = (describe_program(each, "", {"SKIP_PREFLIGHT": "1"}) for each in (words, other))
    assert one == two


@pytest.mark.parametrize(
    ("is_by_hand", "skipped", "compares"),
    [(True, "", True), (True, "1", True), (False, "", False), (False, "1", True)],
)
def test_what_a_preflight_has_compared_is_not_compared_again(
    monkeypatch: pytest.MonkeyPatch, is_by_hand: bool, skipped: str, compares: bool
) -> None:
    told: list[NodeReport] = []

    def meet(address: str, port: int, me: NodeReport, *rest: object, **options: object) -> None:
        told.append(me)
        raise Refused("node-missing", "nobody is there")

    monkeypatch.setattr(checkin, "meet", meet)
    monkeypatch.setenv("SKIP_PREFLIGHT", skipped)
    args, _ = parse(["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "x.py"])
    with pytest.raises(Refused):
        join.join(args, is_by_hand=is_by_hand)
    (report,) = told
    assert ("this project" in report.files) == ("torch" in report.versions) == compares
