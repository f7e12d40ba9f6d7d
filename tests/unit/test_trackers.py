"""Where metrics go: TensorBoard, Weights & Biases offline, a tracker of one's own."""

from __future__ import annotations

import io
import json
import logging
import os
import struct
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from launched import Work
from test_task import work as work

from training import trackers
from training.settings import Settings
from training.trackers import RunFacts, Trackers


class Noting:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.fails = True

    def start(self, facts: RunFacts) -> None:
        self.told.append(facts)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self.told.append((step, dict(metrics)))
        if self.fails and metrics.get("loss") == 0:
            raise ConnectionError("no way there\nat all")

    def close(self) -> None:
        self.told.append("closed")


def test_a_tracker_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = [Noting(), Noting()]

    def refuse() -> None:
        raise RuntimeError("no account")

    classes = {"a:A": lambda: made[0], "b:B": lambda: made[1], "c:C": refuse}
    monkeypatch.setattr(trackers, "load_class", classes.get)
    facts = RunFacts("run", tmp_path, {"seed": 1}, ["node1"], 4)
    both = Trackers([*classes], facts)
    both.recorded = 6
    assert both.record(5, {"loss": 1.0}) and not both.record(6, {"loss": 2.0})
    with caplog.at_level(logging.WARNING):
        made[1].fails = False
        both.record(7, {"loss": 0.0})
        both.record(8, {"loss": 3.0})
    assert caplog.messages == [
        f"tracker {name} failed ({why}); the run continues [log-lost]"
        for name, why in (("c:C", "no account"), ("a:A", "no way there"))
    ]
    assert both.close()
    numbers = [(5, {"loss": 1.0}), (6, {"loss": 2.0}), (7, {"loss": 0.0})]
    assert made[0].told[1:] == numbers
    assert made[1].told[1:-1] == [*numbers, (8, {"loss": 3.0})]
    assert made[1].told[-1] == "closed"
    started = made[1].told[0]
    assert isinstance(started, RunFacts) and (started.first_step, started.recorded) == (4, 6)


def test_a_tracker_that_closes_slowly_is_no_stuck_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beats, is_allowed = [], threading.Event()
    made = Noting()
    made.close = is_allowed.wait  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(trackers, "beat", lambda: beats.append(1))
    monkeypatch.setattr(trackers, "CLOSE_S", 0.01)
    monkeypatch.setattr(trackers, "load_class", {"a:A": lambda: made}.get)
    slow = Trackers(["a:A"], RunFacts("run", tmp_path, {}, [], 0))
    slow.record(1, {"loss": 1.0})
    assert slow.close()
    assert beats and "trackers took over 0.01 s to close" in caplog.text
    is_allowed.set()


def records(file: Path) -> Iterator[bytes]:
    """Yield the records of a .wandb file: a header of 7 bytes, then a log as LevelDB has it."""
    data, at, parts = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.long
def test_weights_and_biases_gets_each_step_once_over_five_starts(work: Work) -> None:
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    words = ("task=points:Stopping", "tracking=[tensorboard,wandb]")
    for _ in range(4):
        work.run("tracked", 2, *words, code=75, STOP_AFTER="6", WANDB_MODE="offline")
    work.run("tracked", 2, *words, WANDB_MODE="offline")
    runs, steps = set(), []
    config: dict[str, Any] = {}
    files = sorted((work.folder / "logs/tracked/wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 5
    for file in files:
        for record in map(pb.Record.FromString, records(file)):
            if record.HasField("run"):
                runs.add(record.run.run_id)
                config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            history = record.history.item
            items = {one.key or one.nested_key[0]: one.value_json for one in history}
            if "loss" in items:
                steps.append(int(items["_step"]))
    assert runs == {"tracked"}
    assert sorted(steps) == list(range(1, 31))
    assert config["train"]["max_steps"] == 30 and config["hosts"] == [os.uname().nodename]
    assert "commit" in config


@pytest.mark.long
def test_tensorboard_drops_what_a_killed_process_recorded_too_much(work: Work) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    work.run("board", 1, "task=points:Stopping", code=75, STOP_AFTER="11")
    latest = work.folder / "checkpoints/board/latest"
    assert latest.readlink().name == "step-11"
    for file in (work.folder / "checkpoints/board/step-11").iterdir():
        file.unlink()  # as if it had not been saved: the run goes back to step 8
    work.run("board", 1, "task=points:Stopping")
    events = EventAccumulator(str(work.folder / "logs/tensorboard/board"))
    events.Reload()
    assert [one.step for one in events.Scalars("loss")] == list(range(1, 31))


@pytest.mark.parametrize(
    ("environ", "file", "is_refused"),
    [
        ({}, "", True),
        ({"WANDB_API_KEY": "k"}, "", False),
        ({"WANDB_MODE": "offline"}, "", False),
        ({}, ".netrc", False),
        ({"NETRC": "/my/netrc"}, "", False),
        ({"RANK": "1"}, "", False),  # it was checked where the run was launched
    ],
)
def test_wandb_without_a_login_is_refused_at_the_start(
    environ: dict[str, str],
    file: str,
    is_refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    os.environ["HOME"] = str(tmp_path)
    os.chdir(tmp_path)
    if file:
        (tmp_path / file).touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    content: dict[str, Any] = {"train": {"max_steps": 1, "batch_size": 1}, "tracking": "wandb"}
    if is_refused:
        with pytest.raises(ValueError, match="wandb has no login on this machine; run wandb login"):
            Settings.model_validate(content, context=environ)
    else:
        assert Settings.model_validate(content, context=environ).tracking == ["wandb"]


def test_wandb_asks_nothing_in_the_middle_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asking = types.ModuleType("wandb")
    asking.init = lambda **_: input("Enter your choice: ")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", asking)
    monkeypatch.setattr(sys, "stdin", kept := io.StringIO("1\n"))
    Trackers(["wandb"], RunFacts("run", tmp_path, {}, [], 0)).record(1, {"loss": 1.0})
    assert "tracker wandb failed (EOF when reading a line); the run continues" in caplog.text
    assert sys.stdin is kept and kept.read() == "1\n"
