"""What rank 0 shows and records: a bar or lines, metrics.jsonl, trackers, loss.png.

The libraries for this are imported only on rank 0, most of them after the first step.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from distributed.lock import UNSUPPORTED
from training import plot
from training.trackers import Trackers, is_installed

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

BAR_EVERY_S = 0.5
LINE_EVERY_S = 5.0
_log = logging.getLogger(__name__)


class ConsoleLog(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10
    """Writes progress to stdout, and warnings to stderr; all of it if stdout is for results only.

    Both are looked up for each line: while rich shows its bar, they write above it.
    """

    def __init__(self, *, is_result_only: bool) -> None:
        super().__init__()
        self._is_result_only = is_result_only

    def emit(self, record: logging.LogRecord) -> None:
        """Choose the stream for a line, and write it there."""
        is_error = self._is_result_only or record.levelno >= logging.WARNING
        self.stream = sys.stderr if is_error else sys.stdout
        super().emit(record)


@contextlib.contextmanager
def may_be_lost(what: str | Path) -> Iterator[None]:
    """If the body fails to show or record something, report it once; the run continues.

    `what` describes the failure; a folder means that the body cannot write to it.
    """
    try:
        yield
    except Exception as error:
        why = getattr(error, "strerror", "") or str(error) or type(error).__name__
        failure = f"cannot write to {str(what)!r}" if isinstance(what, Path) else what
        _warn_lost(failure, why.splitlines()[0])


@functools.cache
def _warn_lost(what: str, why: str) -> None:
    """Log a warning, once for each failure and reason."""
    _log.warning(f"{what} ({why}); the run continues [log-lost]")


def shown(value: float, digits: int = 3) -> str:
    """Return a number with this many decimals; a small one with this many significant digits."""
    is_small = 0 < abs(value) < 0.1
    return f"{value:.{digits}{'g' if is_small else 'f'}}"


def shown_speed(value: float, unit: str) -> str:
    """Return a speed such as 5,576 tokens/s."""
    return f"{value:,.0f} {unit}/s" if value >= 10 else f"{value:.2g} {unit}/s"


@dataclass(frozen=True)
class Limits:
    """The first step of this process, and the limits of the run as far as they are known."""

    first_step: int
    last_step: int | None
    max_seconds: float | None

    def seconds_left(self, step: int, elapsed: float) -> float | None:
        """Return the seconds until a limit ends the run; None if no limit is known to end it."""
        limits = []
        if self.last_step and step > self.first_step:
            limits.append((self.last_step - step) * elapsed / (step - self.first_step))
        if self.max_seconds:
            limits.append(max(0.0, self.max_seconds - elapsed))
        return min(limits) if limits else None


class Progress:
    """Shows and records progress on rank 0; if it is not enabled, no method does anything.

    `folder` is the run's, and is created. If it already holds metrics.jsonl, the lines of steps
    that a resumed run will repeat are removed; `trackers.recorded` becomes the last step in it. The
    speed is in `unit` per second, such as "tokens". What fails causes only a warning.
    """

    def __init__(
        self, folder: Path, unit: str, limits: Limits, trackers: Trackers, *, enabled: bool
    ) -> None:
        self._folder = folder
        self._metrics = folder / plot.METRICS
        self._unit = unit
        self._limits = limits
        self._trackers = trackers
        self._start = time.monotonic()
        self._shown = 0.0
        self._draw_at = 0.0
        self._status = ""  # loss and speed
        self._details = ""  # the slowest rank, data, memory
        self._validation = ""  # the metrics of the newest validation
        self._has_warned = False  # of a validation that is not finite
        self._bar: Bar | None = None
        self._file: TextIO | None = None
        self._enabled = enabled

        if enabled:
            with may_be_lost(folder):
                folder.mkdir(parents=True, exist_ok=True)
                trackers.recorded = self._remove_later(limits.first_step)
                self._file = self._metrics.open("a")  # a new file: an earlier process keeps its own
            is_terminal = sys.stderr.isatty() and _log.isEnabledFor(logging.INFO)
            if is_terminal and is_installed("rich", "no progress bar, only lines"):
                with may_be_lost("no progress bar"):
                    self._bar = _open_bar(limits)

    def close(self) -> None:
        """Close the bar and the trackers, and draw loss.png if metrics were recorded.

        Waits for the trackers, for up to CLOSE_S seconds.
        """
        if self._bar:
            with may_be_lost("no progress bar"):
                self._bar.stop()
        if self._trackers.close():
            self._draw_at = 0.0
            self.draw()

    def show_step(self, step: int) -> None:
        """Show a finished step, if enough time has passed since the last one shown.

        That is BAR_EVERY_S or, without a bar, LINE_EVERY_S seconds. The run's last step is always
        shown. The newest values given to `record` are shown with the step.
        """
        now = time.monotonic()
        is_due = now - self._shown >= (BAR_EVERY_S if self._bar else LINE_EVERY_S)
        if not self._enabled or not (is_due or step == self._limits.last_step):
            return

        self._shown = now
        end = f"/{self._limits.last_step}" if self._limits.last_step else ""
        left = self._limits.seconds_left(step, now - self._start)
        time_left = "" if left is None else f"  {timedelta(seconds=round(left))} left"
        text = f"step {step}{end}{self._status}{time_left}{self._details}"

        if self._bar is None:
            _log.info("%s", text)
        else:
            with may_be_lost("no progress bar"):
                self._bar.update(self._bar.task_ids[0], completed=step, description=text)
                self._bar.refresh()

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Append values to metrics.jsonl, pass them to the trackers, and let `show_step` show them.

        With a loss, they must include the speed. Warns once of a validation that is not finite. The
        first call draws loss.png.
        """
        if not self._enabled:
            return

        if "loss" in values:
            speed = shown_speed(values[f"{self._unit}_per_second"], self._unit)
            self._details = _details_of(values)
            self._status = f"  loss {shown(values['loss'])}{self._validation}  {speed}"
        elif found := {n: v for n, v in values.items() if n.startswith("validation_")}:
            parts = (f"{name.removeprefix('validation_')} {shown(found[name])}" for name in found)
            self._validation = f"  validation {' '.join(parts)}"
            self._warn_not_finite(step, found)

        if self._file:
            with may_be_lost(self._folder):
                line = {"step": step, **values, "time": round(time.time(), 3)}
                self._file.write(json.dumps(line, default=float) + "\n")  # a task's may be tensors
                self._file.flush()
        if self._trackers.record(step, values):
            self.draw()  # imports matplotlib now rather than at the end

    def _warn_not_finite(self, step: int, validated: Mapping[str, float]) -> None:
        """Warn once of metrics that are NaN or infinite: nothing else would report them."""
        odd = [f"{name} {one}" for name, one in validated.items() if not math.isfinite(one)]
        if odd and not self._has_warned:
            self._has_warned = True
            _log.warning(
                f"warning: {', '.join(odd)} after step {step}; check evaluate and its data "
                "(if task.best names this metric, the checkpoint is not kept as the best)"
            )

    def draw(self) -> None:
        """Draw loss.png from metrics.jsonl, unless that would take more than 1% of the time.

        Does nothing without matplotlib.
        """
        began = time.monotonic()
        if self._enabled and began >= self._draw_at and is_installed("matplotlib", "no loss plot"):
            with may_be_lost("no loss plot"):
                plot.draw({"": self._folder}, self._folder / "loss.png", ["loss"], plot.SMALL)
            self._draw_at = began + 100 * (time.monotonic() - began)

    def sync(self) -> None:
        """Flush metrics.jsonl to the disk: a checkpoint must not be ahead of it."""
        if self._file:
            with may_be_lost(self._folder):
                try:
                    os.fsync(self._file.fileno())
                except OSError as error:
                    if error.errno not in UNSUPPORTED:  # the checkpoint reports that
                        raise

    def _remove_later(self, first_step: int) -> int:
        """Remove the lines after a step; returns the last step recorded, removed or not, or 0."""
        lines = [*plot.read_metrics(self._metrics)]
        kept = [line for line in lines if line["step"] <= first_step]
        temporary = self._folder / ".metrics.jsonl"
        temporary.unlink(missing_ok=True)  # others may have made a link or a pipe there
        temporary.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
        temporary.replace(self._metrics)
        return max((line["step"] for line in lines), default=0)


def _details_of(values: Mapping[str, float]) -> str:
    """Return as text the slowest rank, the longest wait for data, MFU, and the most memory used."""
    forms = {
        "slowest": "slowest {:.2f}x",
        "data_wait": "data {:.0%}",
        "mfu": "mfu {:.0%}",
        "peak_memory_gb": "{:.1f} GB",
    }
    return "".join(f"  {f.format(values[name])}" for name, f in forms.items() if name in values)


def _open_bar(limits: Limits) -> Bar:
    """Show a progress bar on stderr. If stdout is a terminal too, text is printed above the bar."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    # No auto_refresh: its thread would take time from the steps.
    bar = Bar(
        BarColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty(),
    )
    bar.add_task("", total=limits.last_step, completed=limits.first_step)
    bar.start()
    bar.console.show_cursor(True)  # a killed process could not restore it
    return bar
