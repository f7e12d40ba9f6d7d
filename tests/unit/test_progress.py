"""What each rank measures, what rank 0 shows and records, and where metrics go."""

import copy
import io
import json
import logging
import math
import os
import pickle
import shutil
import struct
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import written
from job_tools import make_tool
from launched import Work
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from test_task import work as work
from torch import nn

from distributed import torch as torch_helper
from training import plot, progress, trackers
from training.config_file import SettingsError
from training.meter import Meter, Pace, Stopwatch
from training.progress import ConsoleLog, Limits, Progress
from training.settings import load
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


def test_drawing_takes_little_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def draw(*_: object) -> None:
        drawn.append(1)
        time.sleep(1.0)

    monkeypatch.setattr(plot, "draw", draw)
    shown = make(tmp_path / "run")
    for step in range(5):
        shown.record(step, values(4.5))
        shown.draw()
    assert len(drawn) == 1
    shown.close()
    assert len(drawn) == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0009, "0.0009"),
        (0.00012345, "0.000123"),
        (0.0, "0.000"),
        (2.31149, "2.311"),
        (-4e-7, "-4e-07"),
    ],
)
def test_a_small_number_keeps_its_digits(value: float, text: str) -> None:
    assert progress.shown(value) == text
    assert progress.shown_speed(0.26, "samples") == "0.26 samples/s"
    assert progress.shown_speed(5575.6, "tokens") == "5,576 tokens/s"


def test_a_validation_that_is_not_finite_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = make(tmp_path / "run")
    shown.record(1, {"validation_loss": 1.0, "validation_accuracy": 0.5})
    assert not caplog.messages
    for step in (2, 3):
        shown.record(step, {"validation_loss": math.nan, "validation_accuracy": 0.5})
    (told,) = caplog.messages
    assert told.startswith("warning: validation_loss nan after step 2; check evaluate and its data")
    shown.close()


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
    told = f"no loss plot ({why}); the run continues [log-lost]"
    assert [text for text in caplog.messages if "loss plot" in text] == [told]


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def to_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [ConsoleLog(is_result_only=False)])
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    logging.getLogger("training.progress").setLevel(logging.INFO)


def test_progress_is_on_stdout_and_warnings_are_on_stderr(
    tmp_path: Path, to_console: None, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = make(tmp_path)
    shown.show_step(1)
    logging.getLogger("x").warning("be careful")
    shown.close()
    out, err = capsys.readouterr()
    assert (out.startswith("step 1"), err) == (True, "be careful\n")


@pytest.mark.parametrize("stdout", [io.StringIO(), Terminal()])
def test_lines_stand_above_the_bar_if_stdout_is_the_terminal_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_console: None, stdout: io.StringIO
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("TERM", "xterm")
    shown = make(tmp_path)
    shown.show_step(1)
    logging.getLogger("x").warning("be careful")
    logging.getLogger("x").info("resumed")
    shown.close()
    before, after = terminal.getvalue().split("be careful")
    assert before.endswith(("\r\x1b[2K", "\n")) and after.startswith("\n"), terminal.getvalue()
    told = "" if stdout.isatty() else "resumed\n"
    assert (stdout.getvalue(), "resumed" in terminal.getvalue()) == (told, not told)
    assert (sys.stdout, sys.stderr) == (stdout, terminal)


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
    silent.show_step(1)
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
        shown.show_step(step)
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
        shown.show_step(step)
    assert [line.split()[1] for line in caplog.messages] == ["1/3", "3/3"]


def test_the_time_left_is_that_of_the_nearer_limit() -> None:
    assert limits(max_seconds=30).seconds_left(10, 20) == 10
    assert limits(max_seconds=300).seconds_left(10, 20) == 20
    assert limits(last_step=None).seconds_left(10, 20) is None
    assert limits(first_step=5).seconds_left(10, 10) == 20


def test_damaged_lines_and_steps_that_come_again_are_taken_out(tmp_path: Path) -> None:
    before = make(tmp_path)
    for step in (1, 2, 3):
        before.record(step, values(step))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[]\n{"a": 1}\n{"step": 4, "lo')  # killed while writing the last one
    make(tmp_path, first_step=2).record(3, values(5.0))
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [(1, 1), (2, 2), (3, 5)]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_others_put_in_the_place_of_its_files_is_replaced(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("{}")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("metrics.jsonl", ".metrics.jsonl", ".loss.png"):
        if kind == "link":
            (folder / name).symlink_to(victim)
        else:
            os.mkfifo(folder / name)

    shown = make(folder)
    shown.record(1, values(4.5))
    shown.draw()
    assert [line["step"] for line in lines_of(folder)] == [1]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert victim.read_text() == "{}"


def test_a_loss_that_is_not_finite_and_a_tasks_tensor_are_recorded(tmp_path: Path) -> None:
    shown = make(tmp_path)
    shown.record(1, {**values(math.nan), "bits": torch.tensor(0.5)})  # type: ignore[dict-item]
    (line,) = lines_of(tmp_path)
    assert math.isnan(line["loss"]) and line["bits"] == 0.5


# --- where metrics go -----------------------------------------------------------------------------


class Noting:
    """Records its calls."""

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
    assert beats and "trackers took more than 0.01 s to close" in caplog.text
    is_allowed.set()


def records(file: Path) -> Iterator[bytes]:
    """Yield the records of a .wandb file: a header of 7 bytes, then a log in LevelDB's format."""
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
        file.unlink()  # as if it had not been saved: the run continues from step 8
    work.run("board", 1, "task=points:Stopping")
    events = EventAccumulator(str(work.folder / "logs/tensorboard/board"))
    events.Reload()
    assert [one.step for one in events.Scalars("loss")] == list(range(1, 31))


def test_the_commit_is_empty_if_git_is_missing_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = RunFacts("run", tmp_path, {}, ["here"], 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.commit == ""

    make_tool(tmp_path / "git", "printf 'caf\\351\\n'")  # not UTF-8
    assert facts.commit == "caf\ufffd"

    monkeypatch.setattr(trackers, "GIT_S", 0.1)
    make_tool(tmp_path / "git", "exec /bin/sleep 60")
    began = time.monotonic()
    assert facts.commit == ""
    assert time.monotonic() - began < 30


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
    config = written(tmp_path / "my.yaml", "train: {max_steps: 1, batch_size: 1}\n")
    if is_refused:
        with pytest.raises(SettingsError) as error:
            load(config, ["tracking=wandb"], environ)
        told = "command line: tracking: wandb has no login on this machine; run wandb login"
        assert str(error.value).startswith(told)
    else:
        assert load(config, ["tracking=wandb"], environ).tracking == ["wandb"]


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


# --- what each rank measures, and a rank that is slower than the others ---------------------------


# SLOW_RANK computes for 1.3 times as long as the other rank. Each computes for a fixed time, as the
# CPUs may differ in speed. If no rank is slow, both do the same work. With CLOCK, the task has its
# own clock, which other programs on this machine do not affect; its factor is 1.35.
TASK = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from training.tasks import Task

IS_SLOW = os.environ.get("SLOW_RANK") == os.environ["RANK"]
now = 0.0
if "CLOCK" in os.environ:
    time.perf_counter = lambda: now

class Work(Task):
    def __init__(self, settings):
        self.train = self.validation = TensorDataset(torch.ones(64, 1))

    def model(self):
        return nn.Linear(1, 1)

    def loss(self, model, batch):
        global now
        now += 1.35 if IS_SLOW else 1.0
        x, end = torch.eye(192), time.perf_counter() + (0.13 if IS_SLOW else 0.1)
        if not os.environ["SLOW_RANK"]:
            for _ in range(400):
                x = x @ x
        elif "CLOCK" not in os.environ:
            while time.perf_counter() < end:
                x = x @ x
        return model(batch[0]).square().mean() * x.mean()
"""
CONFIG = """
task: slow_work:Work
train: {max_steps: 80, batch_size: 4, log_every: 10}
tracking: []
"""


def run_with_slow_rank(folder: Path, rank: str, **more: str) -> str:
    """Train on two ranks, one of them slower unless `rank` is ""; returns the output."""
    (folder / "slow_work.py").write_text(TASK)
    (folder / "slow_work.yaml").write_text(CONFIG)
    work = Work(folder, "slow_work.yaml")
    return work.run("slow", 2, "resume=never", code=0, SLOW_RANK=rank, **more)


def names_slow_rank(told: str, rank: str) -> bool:
    """Return whether the run named only that rank or, for "", whether it named none."""
    here = os.uname().nodename
    lines = [line for line in told.splitlines() if "[slow-rank]" in line]
    starts = [f"warning: rank {rank} on {here} takes 1."] if rank else []
    return len(lines) == len(starts) and all(map(str.startswith, lines, starts))


@pytest.mark.slow
def test_a_slow_rank_is_named_with_its_node(tmp_path: Path) -> None:
    told = run_with_slow_rank(tmp_path, "1", CLOCK="1")
    assert names_slow_rank(told, "1"), told
    lines = (tmp_path / "logs/slow/metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["slowest"] == pytest.approx(1.35)
    assert last["data_wait"] == 0
    assert 0.05 < last["peak_memory_gb"] < 5


def alone(hosts: list[str]) -> Pace:
    pace = Pace(Meter(), Stopwatch(nn.Linear(1, 1)))
    pace.hosts = hosts
    return pace


OTHERS_HICCUP = [(0.154, 0.198), (0.155, 0.195), (0.153, 0.194), (0.211, 0.209), (0.211, 0.236)]


@pytest.mark.parametrize(
    ("readings", "ratio", "told"),
    [  # each list has readings of 10 steps
        ([(1.0, 1.01, 0.99, 1.5)] * 6, 1.5, "rank 3 on node4 takes 1.50x the compute time of"),
        ([(1.0, 1.01, 0.99, 1.5)] * 4, 1.5, ""),  # it must be slow for 50 steps
        ([(1.0, 2.0 if at == 6 else 1.0) for at in range(20)], 1.0, ""),  # a hiccup
        (OTHERS_HICCUP, 1.26, "rank 1 on node2 takes 1.26x the compute time of the other rank"),
        ([(0.01, 0.02, 0.01)] * 10, 2.0, ""),  # 1 ms per step: too short to matter
        # Of two ranks, at most one is named.
        (
            [(1.0, 1.5)] * 20 + [(1.5, 1.0)] * 20,
            1.5,
            "rank 1 on node2 takes 1.50x the compute time of",
        ),
    ],
)
def test_which_rank_is_named_as_slow(
    caplog: pytest.LogCaptureFixture, readings: Sequence[Sequence[float]], ratio: float, told: str
) -> None:
    pace = alone([f"node{number}" for number in range(1, 5)])
    for number, seconds in enumerate(readings):
        found = pace.compare_and_warn(10 * number, 10 * number + 10, seconds)
    assert found == pytest.approx(ratio, abs=0.01)
    assert len(caplog.messages) == bool(told)  # each rank is named once
    assert all(line.startswith(f"warning: {told}") for line in caplog.messages)


def test_the_warm_up_tells_of_no_slow_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = alone(["node1", "node2"])
    ranks = [[1.0, 0.0, 0.0, 0.1], [1.0, 0.0, 0.0, 0.5]]  # speed, loading, memory, computing
    monkeypatch.setattr(torch_helper, "gather_json", lambda own: ranks)
    found = [pace.read(step, "samples", 0.0) for step in (1, 10, 20)]
    assert ["slowest" in each for each in found] == [False, False, True]


def test_mfu_is_told_where_the_gpu_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(name: str) -> dict[str, float]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5 * 10**9)
        meter = Meter()
        pace = Pace(meter, Stopwatch(nn.Linear(1, 1)))
        monkeypatch.setattr(meter, "read", lambda: (1e6, 0.01))  # tokens/s, the share of loading
        return pace.read(10, "tokens", 8.6e8)

    assert read("NVIDIA H100 80GB HBM3")["mfu"] == pytest.approx(8.6e14 / 989e12)
    assert read("NVIDIA H100 PCIe")["mfu"] == pytest.approx(8.6e14 / 756e12)
    assert "mfu" not in read("NVIDIA T4")
    assert read("NVIDIA T4")["peak_memory_gb"] == 5


def test_the_stopwatch_runs_to_the_last_gradient_and_not_on(clock: list[float]) -> None:
    def wait(weight: torch.Tensor) -> None:
        clock[0] += 4  # as if DDP waited for the other ranks

    class Sleeps(torch.autograd.Function):
        @staticmethod
        def forward(context: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: object, *gradients: torch.Tensor) -> torch.Tensor:
            clock[0] += 2
            return gradients[0]

    model = nn.Linear(1, 1)
    watch = Stopwatch(model)
    model.weight.register_post_accumulate_grad_hook(wait)  # type: ignore[no-untyped-call]
    with watch.running():
        clock[0] += 1
        loss = Sleeps.apply(model(torch.ones(1)))  # type: ignore[no-untyped-call]
    loss.sum().backward()
    assert watch.read() == 3
    assert watch.read() == 0


def test_of_a_sharded_model_the_blocks_forward_passes_count(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each block, fsdp's own hook waits for the other ranks."""

    def take(seconds: float) -> Callable[..., None]:
        return lambda *_: clock.insert(0, clock[0] + seconds)

    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for block in model:
        block.register_forward_pre_hook(take(4))
    monkeypatch.setattr(torch_helper, "is_sharded", lambda _: True)
    monkeypatch.setattr(torch_helper, "blocks", lambda _: model)
    watch = Stopwatch(model)
    for block in model:
        block.register_forward_pre_hook(take(1))
    with watch.running():
        out = model(torch.ones(1))
        take(1)()  # the time of the loss
    out.sum().backward()
    assert watch.read() == 3


def test_a_model_that_is_timed_can_be_copied_and_pickled() -> None:
    model = nn.Linear(1, 1)
    watch = Stopwatch(model)
    with watch.running():
        model(torch.ones(1))
    for copied in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        watch.read()
        copied(torch.ones(1)).sum().backward()
        assert watch.read() == 0


def test_the_part_of_the_time_that_data_takes(clock: list[float]) -> None:
    meter = Meter()
    with meter.loading():
        clock[0] += 1
    meter.add(1, torch.tensor(1.0), 8)
    clock[0] += 3
    assert meter.read() == (2.0, 0.25)
    meter.add(2, torch.tensor(1.0), 8)
    clock[0] += 4
    assert meter.read() == (2.0, 0.0)


def test_the_meter_weighs_its_losses_and_leaves_pauses_out(clock: list[float]) -> None:
    meter = Meter()
    meter.add(1, torch.tensor(1.0), 30)
    meter.add(1, torch.tensor([5.0]), 10)
    clock[0] += 2
    with meter.paused():
        clock[0] += 8
    clock[0] += 2
    assert (meter.state_dict(), meter.read()) == ({"loss": 80.0, "terms": 40}, (10.0, 0.0))
    meter.add(2, torch.tensor(3.0), 60)
    clock[0] += 2
    assert (meter.state_dict(), meter.read()) == ({"loss": 180.0, "terms": 60}, (30.0, 0.0))
    assert meter.speed() == pytest.approx(100 / 6)
    assert meter.wall() == 14.0


def test_a_meter_goes_on_from_anothers_sums() -> None:
    whole, before = Meter(), Meter()
    losses = torch.rand(6)
    for step, loss in enumerate(losses[:3]):
        whole.add(step, loss, step + 1)
        before.add(step, loss, step + 1)
    after = Meter()
    after.load_state_dict(before.state_dict())
    for step, loss in enumerate(losses[3:]):
        whole.add(step, loss, step + 1)
        after.add(step, loss, step + 1)
    assert after.state_dict() == whole.state_dict(), "to the last bit"


def test_the_meter_knows_the_first_loss_that_is_no_number() -> None:
    meter = Meter()
    for step, loss in enumerate((1.0, math.inf, math.nan)):
        meter.add(step, torch.tensor(loss), 1)
    assert not math.isfinite(meter.state_dict()["loss"])
    assert meter.not_finite == (1, math.inf)
