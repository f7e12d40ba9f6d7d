"""What rank 0 shows and records: a bar or lines, metrics.jsonl, TensorBoard, loss.png.

What it needs for that is imported after the first step, and on rank 0 alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

BAR_EVERY_S = 0.5
LINE_EVERY_S = 5.0
_log = logging.getLogger(__name__)


class Meter:
    """Loss and speed of one rank, without waiting for the device between two readings."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._idle = 0.0  # seconds spent paused
        self._terms = 0  # of all stretches that were read
        self._seconds = 0.0
        self._begin_stretch()

    def _begin_stretch(self) -> None:
        self._stretch_start = self.wall() - self._idle
        self._stretch_terms = 0
        self._stretch_loss: Tensor | float = 0.0

    def wall(self) -> float:
        """Return the seconds since the meter was made."""
        return time.perf_counter() - self._start

    def add(self, loss: Tensor, terms: int) -> None:
        """Take in one micro-batch: its mean loss, and how many terms that is over."""
        self._stretch_loss = self._stretch_loss + loss.detach() * terms
        self._stretch_terms += terms

    def read(self) -> dict[str, float]:
        """Return the mean loss and the speed, in terms per second, since the last reading."""
        loss = float(self._stretch_loss) / self._stretch_terms  # waits for the device
        seconds = self.wall() - self._idle - self._stretch_start
        speed = self._stretch_terms / seconds
        self._terms += self._stretch_terms
        self._seconds += seconds
        self._begin_stretch()
        return {"loss": loss, "speed": speed}

    def speed(self) -> float:
        """Return the terms per second over all readings."""
        return self._terms / self._seconds if self._seconds else 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out of the speed what is no training."""
        start = self.wall()
        yield
        self._idle += self.wall() - start


class Progress:
    """Shows and records on rank 0; on any other rank every method does nothing.

    Args:
        folder: the run's, for metrics.jsonl, loss.png and tensorboard/; earlier lines are kept.
        unit: what the speed counts, such as "tokens".
        first_step: steps done before this process started.
        last_step: where the run ends, if it is known.
        max_seconds: when the run ends, if it is limited.
    """

    def __init__(
        self,
        folder: Path,
        *,
        unit: str,
        first_step: int,
        last_step: int | None,
        max_seconds: float | None,
        enabled: bool,
    ) -> None:
        self.folder = folder
        self.enabled = enabled
        self._unit = unit
        self._first_step, self._last_step = first_step, last_step
        self._max_seconds = max_seconds
        self._start = time.monotonic()
        self._shown = 0.0
        self._latest: dict[str, float] = {}
        self._curves: dict[str, dict[int, float]] = {"loss": {}, "validation_loss": {}}
        self._bar: Bar | None = None
        self._events: EventFileWriter | None = None
        if enabled:
            folder.mkdir(parents=True, exist_ok=True)
            self._read_curves()
            if sys.stderr.isatty() and _log.isEnabledFor(logging.INFO):
                self._bar = _open_bar(first_step, last_step)

    def close(self) -> None:
        """Draw the picture, and put the last events on the disk."""
        if self._bar is not None:
            self._bar.stop()
        if self._events is not None:
            self.draw()
            self._events.close()

    def step(self, step: int) -> None:
        """Note that a step is done, and show it where it is time to."""
        now = time.monotonic()
        if self.enabled and now - self._shown >= (BAR_EVERY_S if self._bar else LINE_EVERY_S):
            self._shown = now
            self._show(step, now - self._start)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Append values to metrics.jsonl, TensorBoard and the curves of loss.png."""
        if not self.enabled:
            return
        line = {"step": step, **values, "time": round(time.time(), 3)}
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._latest.update(values)
        self._add_to_curves(line)
        self._record_events(step, values)

    def say(self, text: str) -> None:
        """Show a line beside the bar or among the lines."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self.enabled:
            _log.info("%s", text)

    def draw(self) -> None:
        """Draw loss.png anew."""
        if not self.enabled:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure  # no pyplot: no global state, a quicker import

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(xlabel="step", ylabel="loss")
        axes.plot(*zip(*self._curves["loss"].items(), strict=True), label="training")
        if self._curves["validation_loss"]:
            curve = self._curves["validation_loss"].items()
            axes.plot(*zip(*curve, strict=True), "o-", label="validation")
        axes.grid(alpha=0.3)
        axes.legend()
        temporary = self.folder / ".loss.png"
        figure.savefig(temporary, format="png")
        temporary.replace(self.folder / "loss.png")  # a viewer never sees half a picture

    def _show(self, step: int, elapsed: float) -> None:
        parts = [f"{step}/{self._last_step}" if self._last_step else f"{step}"]
        if "loss" in self._latest:
            parts.append(f"loss {self._latest['loss']:.3f}")
            parts.append(f"{self._latest[f'{self._unit}_per_second']:,.0f} {self._unit}/s")
        if (left := self._seconds_left(step, elapsed)) is not None:
            parts.append(f"{clock(left)} left")
        if self._bar is None:
            _log.info("step %s", "  ".join(parts))
        else:
            self._bar.update(self._bar.task_ids[0], completed=step, status="  ".join(parts))
            self._bar.refresh()

    def _seconds_left(self, step: int, elapsed: float) -> float | None:
        limits = []
        if self._last_step and step > self._first_step:
            limits.append((self._last_step - step) * elapsed / (step - self._first_step))
        if self._max_seconds:
            limits.append(max(0.0, self._max_seconds - elapsed))
        return min(limits, default=None)

    def _read_curves(self) -> None:
        """Take up the curves of the run so far."""
        with contextlib.suppress(FileNotFoundError):
            for text in (self.folder / "metrics.jsonl").read_text().splitlines():
                line = json.loads(text)
                if line["step"] <= self._first_step:
                    self._add_to_curves(line)

    def _add_to_curves(self, line: Mapping[str, float]) -> None:
        for name, curve in self._curves.items():
            if name in line:
                curve[int(line["step"])] = line[name]

    def _record_events(self, step: int, values: Mapping[str, float]) -> None:
        # torch.utils.tensorboard would do the same for 1.5 s of imports.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._events is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._events = EventFileWriter(str(self.folder / "tensorboard"))
            self.draw()  # the first costs its imports: better now than at the end
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = Event(step=step, wall_time=time.time(), summary=Summary(value=points))
        self._events.add_event(event)


def _open_bar(first_step: int, last_step: int | None) -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    # Refreshed by hand: a thread of its own would take time from the steps.
    columns = (TextColumn("step"), BarColumn(), TextColumn("{task.fields[status]}"))
    bar = Bar(*columns, console=Console(stderr=True), auto_refresh=False)
    bar.add_task("", total=last_step, completed=first_step, status="")
    bar.start()
    bar.console.show_cursor(True)  # for whoever is killed, and could not bring it back
    return bar


def clock(seconds: float) -> str:
    """Return a time as m:ss, or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
