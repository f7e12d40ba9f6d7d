"""What rank 0 shows and records."""

from __future__ import annotations

import io
import json
import logging
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from training import plot
from training.progress import Limits, Progress
from training.trackers import RunFacts, Trackers


def make(folder: Path, *, enabled: bool = True, **changes: Any) -> Progress:
    chosen = limits(**changes)
    facts = RunFacts("run", folder, {}, ["here"], chosen.first_step)
    trackers = Trackers(["tensorboard"], facts)
    return Progress(folder, "tokens", chosen, trackers, enabled=enabled)


def limits(**changes: Any) -> Limits:
    return Limits(**{"first_step": 0, "last_step": 20, "max_seconds": None, **changes})


def values(loss: float) -> dict[str, float]:
    return {"loss": loss, "lr": 0.1, "tokens_per_second": 1234.0}


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    shown = make(tmp_path / "run")
    shown.record(1, values(4.5))
    shown.record(2, {"validation_loss": 3.5})
    shown.close()
    (file,) = (tmp_path / "tensorboard/run").iterdir()
    found = {
        (event.step, value.tag): value.tensor.float_val[0]
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert found[1, "loss"] == 4.5
    assert found[2, "validation_loss"] == 3.5


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), RuntimeError("Could not determine home directory.\n")]
)
def test_a_picture_that_fails_ends_no_run_and_is_told_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(plot, "draw", fail)
    shown = make(tmp_path)
    shown.record(1, values(4.0))
    shown.draw()
    shown.close()
    why = getattr(error, "strerror", None) or str(error).strip()
    told = f"no picture of the loss ({why}); the run continues [log-lost]"
    assert [text for text in caplog.messages if "picture" in text] == [told]


def test_a_folder_that_is_lost_ends_no_run_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = make(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("in its place")
    for step in (1, 2):
        shown.record(step, values(1.0))
        shown.sync()
    shown.close()
    assert sum("the run continues [log-lost]" in text for text in caplog.messages) == 1


def test_a_damaged_metrics_file_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n\xff\xfe\n[]\n{"a": 1}\n')
    make(tmp_path, first_step=5).close()
    assert lines_of(tmp_path) == [{"step": 1, "loss": 2.0}]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_warning_stands_on_a_line_of_its_own_above_the_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.root, "handlers", [handler])
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    logging.getLogger("training.progress").setLevel(logging.INFO)
    shown = make(tmp_path)
    shown.step(1)
    logging.getLogger("x").warning("be careful")
    shown.close()
    before, after = terminal.getvalue().split("be careful")
    assert before.endswith(("\r\x1b[2K", "\n")) and after.startswith("\n"), terminal.getvalue()
    assert handler.stream is terminal and sys.stderr is terminal


def test_a_run_that_was_taken_over_adds_no_line(tmp_path: Path) -> None:
    cut_off = make(tmp_path)
    cut_off.record(10, values(3.0))
    taken_over = make(tmp_path, first_step=10)
    cut_off.record(20, values(2.0))
    taken_over.record(20, values(1.0))
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [(10, 3.0), (20, 1.0)]


def test_another_rank_shows_and_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    silent = make(tmp_path / "run", enabled=False)
    silent.step(1)
    silent.record(1, values(1.0))
    silent.draw()
    silent.close()
    assert not (tmp_path / "run").exists()
    assert not caplog.messages


def test_a_line_comes_by_time_not_by_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: list[float]
) -> None:
    caplog.set_level(logging.INFO)
    shown = make(tmp_path)
    shown.record(1, values(2.0))
    for step in range(1, 11):
        clock[0] += 1.0
        shown.step(step)
        more = {"data_wait": 0.021, "slowest": 1.04, "peak_memory_gb": 0.44}
        shown.record(step, {**values(2.0), **more})
    assert caplog.messages == [
        "step 1/20  loss 2.000  1,234 tokens/s  0:00:19 left",
        "step 6/20  loss 2.000  1,234 tokens/s  0:00:14 left  slowest 1.04x  data 2%  0.4 GB",
    ]


def test_the_last_step_is_shown_whatever_the_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shown = make(tmp_path, last_step=3)
    for step in (1, 2, 3):
        shown.step(step)
    assert [line.split()[1] for line in caplog.messages] == ["1/3", "3/3"]


def test_the_time_left_is_that_of_the_nearer_limit() -> None:
    assert limits(max_seconds=30).seconds_left(10, 20) == 10
    assert limits(max_seconds=300).seconds_left(10, 20) == 20
    assert limits(last_step=None).seconds_left(10, 20) is None
    assert limits(first_step=5).seconds_left(10, 10) == 20


def test_lines_cut_short_and_steps_that_come_again_are_taken_out(tmp_path: Path) -> None:
    before = make(tmp_path)
    for step in (1, 2, 3):
        before.record(step, values(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed within the line
    make(tmp_path, first_step=2).record(3, values(5.0))
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [(1, 1), (2, 2), (3, 5)]


def test_a_loss_that_is_not_finite_and_a_tasks_tensor_are_recorded(tmp_path: Path) -> None:
    shown = make(tmp_path)
    shown.record(1, {**values(math.nan), "bits": torch.tensor(0.5)})  # type: ignore[dict-item]
    (line,) = lines_of(tmp_path)
    assert math.isnan(line["loss"]) and line["bits"] == 0.5
