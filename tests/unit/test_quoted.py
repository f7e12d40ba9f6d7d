"""What a command measured stays on the pages as it was printed."""

import json
from pathlib import Path

import pytest
import quoted
from agents import ROOT


def test_measured_blocks_are_as_their_commands_wrote_them() -> None:
    now, recorded = quoted.checksums(), quoted.read()
    changed = sorted(command for command in now if now[command] != recorded.get(command))
    assert changed == [], "restore these blocks; only the commands that measure write them"
    assert sorted(recorded) == sorted(now)


def test_every_dated_line_of_the_pages_begins_a_block() -> None:
    for page in quoted.PAGES:
        lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
        dated = [line for line in lines if line[:2] == "20" and line[4:5] == line[7:8] == "-"]
        assert dated and [line for line in dated if not quoted._START.match(line)] == []


def test_the_gpu_table_quotes_the_messages_of_that_day() -> None:
    block = quoted.find_blocks()["make test-gpu"]
    assert "2 processes but 1 visible GPU; ask for fewer, or see CUDA_VISIBLE_DEVICES" in block
    assert "no sign of life for 12 s; the limit, HANG_SECONDS, is 10 s" in block


PAGE = """# Page

2026-11-28, 2 cores (X), Python 3.11.7: `make bench-launch`, medians of 7

| launcher | median s |
| --- | --- |
| ours | 2.74 |

A remark.

## Another

2026-11-28, 2 cores (X), Python 3.11.7, commit abcd, changed: `make prove PART=kills`, in 1 min

| kill -9 of | left |
| --- | --- |
| a rank | 0 |
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page whose two blocks are recorded."""
    page = tmp_path / quoted.TABLES
    page.parent.mkdir()
    page.write_text(PAGE)
    monkeypatch.setattr(quoted, "ROOT", tmp_path)
    monkeypatch.setattr(quoted, "FILE", tmp_path / "quoted.json")
    monkeypatch.setattr(quoted, "PAGES", (quoted.TABLES,))
    quoted.FILE.write_text("{}")
    quoted.record("make bench-launch", "make prove PART=kills")
    assert quoted.read() == quoted.checksums()
    return page


@pytest.mark.parametrize(
    ("before", "after"),
    [("2.74", "2.7"), ("| launcher", "| program"), ("2026-11-28, 2", "2026-11-29, 2")],
)
def test_an_edited_cell_is_noticed(page: Path, before: str, after: str) -> None:
    page.write_text(PAGE.replace(before, after, 1))
    assert quoted.read() != quoted.checksums()


def test_a_remark_may_be_reworded(page: Path) -> None:
    page.write_text(PAGE.replace("A remark.", "Another remark."))
    assert quoted.read() == quoted.checksums()


def test_a_command_records_its_own_block_and_no_other(page: Path) -> None:
    page.write_text(PAGE.replace("2.74", "2.70").replace("| a rank | 0 |", "| a rank | 1 |"))
    quoted.record("make bench-launch")
    now, recorded = quoted.checksums(), json.loads(quoted.FILE.read_text())
    assert recorded["make bench-launch"] == now["make bench-launch"]
    assert recorded["make prove PART=kills"] != now["make prove PART=kills"]
