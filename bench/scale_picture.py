"""The picture beside the tables of `make bench-scale`, which also draws it.

python bench/scale_picture.py draws it again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import figures
import matplotlib
from harness import README, ROOT
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

TITLE = "The number of nodes"  # of the section that has the tables
PICTURE = ROOT / "bench/scale.svg"
LEAST_S = 0.01  # the clock of a process has steps of this size
EACH_S = 0.001  # the straight line: this long for each node
Curve = dict[int, float]  # CPU seconds by the number of nodes


def curves() -> dict[str, dict[str, Curve]]:
    """Return the curve of each event, by the program whose processor time it is."""
    found: dict[str, dict[str, Curve]] = {}
    for line in figures.section(README.read_text(encoding="utf-8"), TITLE):
        program, event = next(iter(line.items()))
        curve = found.setdefault(program, {}).setdefault(event, {})
        curve.update(_points(line))
    return found


def _points(line: figures.Row) -> Iterator[tuple[int, float]]:
    for head, cell in line.items():
        size = re.match(r"(\d+) nodes", head)
        if size and cell != "-" and float(cell) >= LEAST_S:
            yield int(size[1]), float(cell)


def draw(to: Path = PICTURE) -> None:
    """Draw the recorded tables, one panel each: how the cost grows with the number of nodes."""
    panels = curves()
    sizes = sorted({size for each in panels.values() for one in each.values() for size in one})
    most_s = max(s for each in panels.values() for one in each.values() for s in one.values())
    tens = [10.0**power for power in range(-2, 4) if 10**power < 2 * most_s]
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)

    with matplotlib.rc_context({"svg.hashsalt": "scale", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.5 * columns, 5 * lines), layout="constrained")
        FigureCanvasSVG(figure)
        for number, (program, events) in enumerate(panels.items()):
            axes = figure.add_subplot(lines, columns, number + 1)
            axes.set(title=program, xlabel="nodes", ylabel="CPU s", xscale="log", yscale="log")
            axes.set_xticks(sizes, [f"{size}" for size in sizes])
            axes.set_yticks(tens, [f"{ten:g}" for ten in tens])
            axes.minorticks_off()
            for (event, curve), mark in zip(events.items(), itertools.cycle("osv^Dxp*")):
                places = sorted(curve)
                costs = [curve[place] for place in places]
                axes.plot(places, costs, f"{mark}-", label=event, markersize=5)

            ideal = [EACH_S * size for size in sizes]
            axes.plot(sizes, ideal, "--", color="grey", label=f"{EACH_S * 1000:g} ms a node")
            axes.set_ylim(LEAST_S / 1.5, 2 * most_s)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")

        figure.savefig(to, format="svg", metadata={"Date": None, "Title": about()})


def about() -> str:
    """Return when, where and how the recorded tables were measured."""
    return figures.source(README.read_text(encoding="utf-8"), TITLE)


if __name__ == "__main__":
    draw()
