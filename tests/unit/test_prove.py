"""`make prove`: which parts it runs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def prove() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[1] / "prove.py"))


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
