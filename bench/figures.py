"""The few figures of the main README, taken from the tables of bench/README.md and bench/proofs.md.

The benches and `make prove` call `write`, so that the page never shows other figures than theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "README.md"
_SECTION = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)
Row = dict[str, str]


def write() -> None:
    """Put the figures of today's tables into the main README."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_SECTION.sub(lambda at: f"{at[1]}{text()}{at[2]}", page), encoding="utf-8")


def text() -> str:
    """Return the table for the main README."""
    lines = ["| | this project | for comparison | measure it again |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in _rows()]
    return "\n".join(lines) + "\n"


def _rows() -> Iterator[tuple[str, str, str, str]]:
    measured = (ROOT / "bench/README.md").read_text(encoding="utf-8")
    proved = (ROOT / "bench/proofs.md").read_text(encoding="utf-8")

    launch = _by(_section(measured, "Launch to the first optimizer step"), "launcher", "8")
    yield (
        "launch of 8 processes, to the end of the first step",
        f"{launch['ours']['median s']} s",
        f"torchrun {launch['torchrun']['median s']} s",
        "`make bench-launch`",
    )
    restart = _by(_section(measured, "From a killed rank to training again"), "launcher", "1 x 4")
    torchrun, working = restart["torchrun"], restart["torchrun, a store for each attempt"]
    yield (
        "restart of 4 processes after one is killed",
        f"{restart['ours']['median s']} s",
        f"torchrun {working['median s']} s with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`; "
        f"without, {torchrun['worked']} restarts worked",
        "`make bench-restart`",
    )
    save = _by(_section(measured, "Saving a checkpoint"), "saved by", "1.6")
    yield (
        "time that training waits for a save of 1.6 GB",
        f"{save['ours']['stall s']} s",
        f"`torch.save` {save['torch.save']['stall s']} s",
        "`make bench-checkpoint`",
    )
    step = _by(_section(measured, "Step time"), "strategy", "ddp")["ddp"]
    yield (
        "one training step of `train.py`",
        f"{step['train.py, ms']} ms",
        f"a bare loop {step['bare loop, ms']} ms",
        "`make bench-step`",
    )
    kills = _section(proved, "One dies, all stop")
    yield (
        "`kill -9` of a rank, the node agent or the launcher",
        f"{sum(int(row['times']) for row in kills)} times: "
        f"{sum(int(row['processes left']) for row in kills)} processes left, "
        f"all gone within {max(float(row['max s']) for row in kills):.2f} s",
        "[what others leave](bench/README.md#when-something-goes-wrong)",
        "`make prove`",
    )
    saves = _section(proved, "Killed while saving")  # a row for each format
    times, runs, equal = (
        sum(int(row[name]) for row in saves)
        for name in ("kills", "runs", "equal to an uninterrupted run")
    )
    yield (
        "`kill -9` in the middle of a save, then resumed",
        f"{times} kills in {runs} runs: {equal} runs equal an uninterrupted run, byte for byte",
        "",
        "`make prove`",
    )


def _section(page: str, title: str) -> list[Row]:
    """Return the rows of all tables below a heading, each by the heads of its columns."""
    part = page[page.index(f"\n## {title}") + 1 :].partition("\n## ")[0]
    rows: list[Row] = []
    head: list[str] = []
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        elif set(line) - set("|- "):
            rows.append(dict(zip(head, cells, strict=True)))
    return rows


def _by(rows: list[Row], column: str, first: str) -> dict[str, Row]:
    """Return rows by one column; only those whose first cell is `first`, unless that is empty."""
    return {
        row[column]: row
        for row in rows
        if column in row and (not first or next(iter(row.values())) == first)
    }


if __name__ == "__main__":
    write()
