"""The few figures of the main README, taken from the tables of bench/README.md and bench/proofs.md.

The benches and `make prove` call `write`, so that the README always shows their latest figures.
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
    """Put the figures of the current tables into the main README."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_SECTION.sub(lambda at: f"{at[1]}{text()}{at[2]}", page), encoding="utf-8")


def text() -> str:
    """Return the table for the main README."""
    lines = ["| | this project, and for comparison | what to know; how it was measured |"]
    lines += ["|---|---|---|"]
    for what, ours, other, note, measured in _rows():
        lines.append(f"| {what} | {_stack(ours, other)} | {_stack(note, measured)} |")
    return "\n".join(lines) + "\n"


def _stack(*texts: str) -> str:
    """Return a cell with each text on a line of its own: a phone cuts off a fourth column."""
    return "<br>".join(filter(None, texts))


def _rows() -> Iterator[tuple[str, str, str, str, str]]:
    measured = (ROOT / "bench/README.md").read_text(encoding="utf-8")
    proved = (ROOT / "bench/proofs.md").read_text(encoding="utf-8")
    yield _launch(measured)
    yield _restart(measured)
    yield _save(measured)
    yield _step(measured)

    title = "One dies, all stop"
    kills = section(proved, title)
    yield (
        "`kill -9` of a rank, the node agent or the launcher",
        f"{sum(int(row['times']) for row in kills)} times: "
        f"{sum(int(row['processes left']) for row in kills)} processes left, "
        f"all gone within {max(float(row['max s']) for row in kills):.2f} s",
        "[what others leave](bench/README.md#when-something-goes-wrong)",
        f"one machine, {_before(proved, title, ' ranks')} ranks",
        source(proved, title),
    )
    title = "Killed while saving"
    saves = section(proved, title)  # a row for each format
    times, runs, equal = (
        sum(int(row[name]) for row in saves)
        for name in ("kills", "runs", "equal to an uninterrupted run")
    )
    yield (
        "`kill -9` in the middle of a save, then resumed",
        f"{times} kills in {runs} runs: {equal} runs equal an uninterrupted run, byte for byte",
        "",
        "`train.py` on 2 CPU ranks",
        source(proved, title),
    )


def _launch(measured: str) -> tuple[str, str, str, str, str]:
    title = "Launch to the first optimizer step"
    rows = section(measured, title)
    launch, of_two = (_by(rows, "launcher", number) for number in ("8", "2"))
    return (
        "launch of 8 processes, to the end of the first step",
        f"{launch['ours']['median s']} s",
        f"torchrun {launch['torchrun']['median s']} s",
        f"8 processes on 2 cores, where torchrun imports torch 8 times; 2 processes: "
        f"{of_two['ours']['median s']} and {of_two['torchrun']['median s']} s",
        source(measured, title),
    )


def _restart(measured: str) -> tuple[str, str, str, str, str]:
    title = "From a killed rank to training again"
    rows = [row for row in section(measured, title) if next(iter(row.values())) in ("4", "1 x 4")]
    ours, torchrun, working, _ = rows  # in the order of bench/restart.py
    return (
        "restart of 4 processes after one is killed",
        f"{ours['median s']} s",
        f"torchrun {working['median s']} s",
        "torchrun with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`; without it, "
        f"{torchrun['worked']} restarts succeeded",
        source(measured, title),
    )


def _save(measured: str) -> tuple[str, str, str, str, str]:
    title = "Saving a checkpoint"
    rows = section(measured, title)
    save, loop = _by(rows, "saved by", "1.6"), _by(rows, "400 steps", "")
    ours, torchs = save["ours"], save["torch.save"]
    return (
        "time that training waits for a save of 1.6 GB",
        f"{ours['stall s']} s",
        f"`torch.save` {torchs['stall s']} s",
        f"from the second save on; the first takes {ours['first stall s']} and "
        f"{torchs['first stall s']} s. End to end, 4 saves in 400 steps add "
        f"{loop['ours']['added s']} and {loop['torch.save']['added s']} s "
        f"({loop['ours']['x torch.save']}x)",
        source(measured, title),
    )


def _step(measured: str) -> tuple[str, str, str, str, str]:
    title = "Step time of the training loop"
    step = _by(section(measured, title), "strategy", "ddp")["ddp"]
    return (
        "one training step of `train.py`",
        f"{step['train.py, ms']} ms",
        f"a bare loop {step['bare loop, ms']} ms",
        f"a small model on 2 CPU ranks; median of the ratios {step['ratio']}",
        source(measured, title),
    )


def _part(page: str, title: str) -> str:
    return page[page.index(f"\n## {title}") + 1 :].partition("\n## ")[0]


def source(page: str, title: str) -> str:
    """Return when, where and how the tables below a heading were measured."""
    line = r"^(\d{4}-\d\d-\d\d, .*?), Python [^,:]+(, commit [^:]+)?: (.+)$"
    found = re.search(line, _part(page, title), re.M)
    assert found, title
    return f"{found[1]}{found[2] or ''}: {found[3]}"


def _before(page: str, title: str, word: str) -> str:
    """Return the number that precedes a word in the text below a heading."""
    found = re.search(rf"(\d+){word}", _part(page, title))
    assert found, title
    return found[1]


def section(page: str, title: str) -> list[Row]:
    """Return the rows of all tables below a heading, each by its column headings."""
    part = _part(page, title)
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
    """Return rows by one column; if `first` is not empty, only those with that first cell."""
    return {
        row[column]: row
        for row in rows
        if column in row and (not first or next(iter(row.values())) == first)
    }


if __name__ == "__main__":
    write()
