"""The README's figures and pictures come from the benches and from real runs."""

from __future__ import annotations

import html
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import figures
import pytest
from agents import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/pictures.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def block_of(shown: str) -> list[str]:
    """Return the rows of the failure block that ends a text, without what differs each time."""
    block = shown[shown.index("FAILED") :]
    block = re.sub(r"\(the batch has samples [\d,.\s]+\)", "(SAMPLES)", block)
    block = re.sub(r"\d{8}-\d{6}-[0-9a-f]{4}", "RUN", block)
    block = re.sub(r"\d+ s after the start", "N s after the start", block)
    block = re.sub(r"(node_0.log|~/launch-kit/\S+):\d+", r"\1:N", block)
    return [" ".join(line.split()) for line in block.splitlines() if line.strip()]


def test_the_figures_are_those_of_the_benches() -> None:
    """`python bench/figures.py` updates them; so does each bench."""
    section = f"<!-- figures -->\n{figures.text()}<!-- /figures -->"
    assert section in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_first_command_prints_what_the_page_shows(tmp_path: Path) -> None:
    """The rows and the words of the script; numbers differ from machine to machine."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^    \$ (scripts/launch.sh --nproc.*)\n((?:    .*\n)+)", page, re.M)
    assert block
    command = shlex.split(block[1])
    command[0], command[-1] = str(ROOT / command[0]), str(ROOT / command[-1])
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**kept, "PYTHON": sys.executable, "BACKEND": "gloo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    today = [line for line in done.stdout.splitlines() if "warning: " not in line]
    assert [line.split()[0] for line in block[2].splitlines()] == [one.split()[0] for one in today]


@pytest.mark.slow
def test_the_picture_of_a_failure_shows_the_block_of_today(
    pictures: ModuleType, tmp_path: Path
) -> None:
    """`python docs/pictures.py failure` draws it again."""
    rows: dict[float, str] = defaultdict(str)
    text = r'<text class="[^"]*" x="[\d.]+" y="([\d.]+)"[^>]*>([^<]*)</text>'
    for y, piece in re.findall(text, (ROOT / "docs/failure.svg").read_text(encoding="utf-8")):
        rows[float(y)] += html.unescape(piece).replace("\xa0", " ")
    drawn = "\n".join(rows[y].rstrip("\n") for y in sorted(rows))
    today = pictures.take("failure", tmp_path)
    assert block_of(drawn) == block_of(re.sub(r"\x1b\[[\d;]*m", "", today))


def test_a_picture_shows_what_a_terminal_shows_at_the_end(pictures: ModuleType) -> None:
    bar = "\r\x1b[2K\x1b[31m--  \x1b[0m 1/2\r\x1b[2K\x1b[32m----\x1b[0m 2/2"
    sent = f"\x1b[?25lplan\r\n{bar}\x1b[?25h\r\ntwo\r\nlines\x1b[1A\x1b[2Kone"
    assert pictures.show(sent) == "plan\n\x1b[32m----\x1b[0m 2/2\none"
