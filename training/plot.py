"""Draw pictures of runs from their metrics.jsonl: loss, speed, learning rate, gradient norm.

python -m training.plot RUN [RUN...] [--to FILE]       RUN: a run id, or its log folder

The picture is runs.png in the run's log folder or, for several runs, beside the first run's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.errors import REFUSED

METRICS = "metrics.jsonl"
SLIDE = (12.8, 7.2)  # inches, at 100 dots each
SMALL = (7, 4)
# The metrics that each panel shows: their names, or endings that begin with an underscore.
PANELS = {
    "loss": ("loss", "validation_loss"),
    "speed": ("_per_second",),
    "learning rate": ("lr",),
    "gradient norm": ("grad_norm",),
}


def read_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics.jsonl, if it exists, and is not a link or a pipe.

    Skips lines that are not JSON, or have no step.
    """
    is_own = file.is_file() and not file.is_symlink()
    for text in file.read_bytes().splitlines() if is_own else ():
        with contextlib.suppress(ValueError):  # half a line, from a process that was killed
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                yield line


def draw(
    runs: Mapping[str, Path],
    to: Path,
    panels: Sequence[str] = tuple(PANELS),
    size: tuple[float, float] = SLIDE,
) -> None:
    """Draw the named runs' metrics as a PNG file, one panel per kind; replaces it atomically.

    Omits panels without data. `size` is in units of 100 dots. Raises ModuleNotFoundError without
    matplotlib.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it logs about fonts
    backend = os.environ.pop("MPLBACKEND", None)  # a notebook's may not be installed here
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure  # pyplot is slower to import and has global state
    finally:
        if backend:
            os.environ["MPLBACKEND"] = backend

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    found = {name: _curves(read_metrics(folder / METRICS)) for name, folder in runs.items()}
    used = [panel for panel in panels if any(_shown(each, panel) for each in found.values())]
    used = used or [panels[0]]  # an empty one
    columns = 2 if len(used) > 1 else 1
    rows = math.ceil(len(used) / columns)

    for number, panel in enumerate(used, 1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set(xlabel="step", ylabel=panel)
        for run, (name, curves) in enumerate(found.items()):
            for metric in _shown(curves, panel):
                is_held_out = metric.startswith("validation")
                label = metric if len(runs) == 1 else f"{name} {metric}"
                style = "o-" if is_held_out else "-"
                color = f"C{2 * run + is_held_out}"  # each run has two of matplotlib's colors
                axes.plot(*zip(*curves[metric], strict=True), style, label=label, color=color)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()

    if len(used) > 1:
        figure.suptitle(", ".join(runs))
    temporary = to.with_name(f".{to.name}")
    temporary.unlink(missing_ok=True)  # others may have made a link there
    figure.savefig(temporary, format="png", dpi=100)
    temporary.replace(to)


def _curves(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the step and the value of each reading, by metric."""
    curves = dict[str, list[tuple[int, float]]]()
    for line in lines:
        for name, value in line.items():
            curves.setdefault(name, []).append((line["step"], value))
    return curves


def _shown(curves: Mapping[str, object], panel: str) -> list[str]:
    """Return the metrics that a panel shows."""
    ends = PANELS[panel]
    return [name for name in curves if name in ends or (ends[0][0] == "_" and name.endswith(ends))]


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m training.plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+")
    parser.add_argument("--to", metavar="FILE", type=Path)
    chosen = parser.parse_args(arguments)

    logs = Path(os.environ.get("LOG_DIR") or "logs")
    folders = {run: Path(run) if "/" in run else logs / run for run in chosen.runs}
    for file in (folder / METRICS for folder in folders.values()):
        if not file.is_file():
            print(f"plot: there is no {file}; give a run id or its log folder", file=sys.stderr)
            return 2

    first = folders[chosen.runs[0]]
    to = chosen.to or (first if len(folders) == 1 else first.parent) / "runs.png"
    try:
        draw(folders, to)
    except ModuleNotFoundError as error:
        cure = f"run {sys.executable} -m pip install matplotlib"
        print(f"plot: {sys.executable} lacks {error.name}; {cure}", file=sys.stderr)
        return REFUSED
    print(to)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
