"""The README's figures and pictures come from the benches and from real runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import figures

ROOT = Path(__file__).resolve().parents[2]


def test_the_figures_are_those_of_the_benches() -> None:
    """`python bench/figures.py` updates them; so does each bench."""
    section = f"<!-- figures -->\n{figures.text()}<!-- /figures -->"
    assert section in (ROOT / "README.md").read_text()


def test_a_picture_shows_what_a_terminal_shows_at_the_end() -> None:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/pictures.py")
    assert spec and spec.loader
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    bar = "\r\x1b[2K\x1b[31m--  \x1b[0m 1/2\r\x1b[2K\x1b[32m----\x1b[0m 2/2"
    sent = f"\x1b[?25lplan\r\n{bar}\x1b[?25h\r\ntwo\r\nlines\x1b[1A\x1b[2Kone"
    assert pictures.show(sent) == "plan\n\x1b[32m----\x1b[0m 2/2\none"
