"""What each rank measures, and a rank that computes slower than the others."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from launched import Work
from torch import nn

from distributed import torch as torch_helper
from training.meter import Meter, Pace, Stopwatch

# SLOW_RANK computes for 1.3 times as long as the other rank, by the clock: of their CPUs one may be
# faster. Where none is slow, both do the same work. With CLOCK, the clock is one of the task's own,
# which other programs on this machine do not touch.
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
    """Train on two ranks, one of them slower unless it is ""; returns what was said."""
    (folder / "slow_work.py").write_text(TASK)
    (folder / "slow_work.yaml").write_text(CONFIG)
    work = Work(folder, "slow_work.yaml")
    return work.run("slow", 2, "resume=never", code=0, SLOW_RANK=rank, **more)


def names_slow_rank(told: str, rank: str) -> bool:
    """Return whether the run named that rank, and no other; "": whether it named none."""
    here = os.uname().nodename
    lines = [line for line in told.splitlines() if "[slow-rank]" in line]
    starts = [f"warning: rank {rank} on {here} computes 1."] if rank else []
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
    [  # each of 10 steps
        ([(1.0, 1.01, 0.99, 1.5)] * 6, 1.5, "rank 3 on node4 computes 1.50x as long as the median"),
        ([(1.0, 1.01, 0.99, 1.5)] * 4, 1.5, ""),  # it must be slow for 50 steps
        ([(1.0, 2.0 if at == 6 else 1.0) for at in range(20)], 1.0, ""),  # a hiccup
        (OTHERS_HICCUP, 1.26, "rank 1 on node2 computes 1.26x as long as the other rank"),
        ([(0.01, 0.02, 0.01)] * 10, 2.0, ""),  # 1 ms a step: a toy
        # Of two ranks, at most one is named.
        ([(1.0, 1.5)] * 20 + [(1.5, 1.0)] * 20, 1.5, "rank 1 on node2 computes 1.50x as long as"),
    ],
)
def test_which_rank_is_named_as_slow(
    caplog: pytest.LogCaptureFixture, readings: Sequence[Sequence[float]], ratio: float, told: str
) -> None:
    pace = alone([f"node{number}" for number in range(1, 5)])
    for number, seconds in enumerate(readings):
        found = pace.compare(10 * number, 10 * number + 10, seconds)
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
        monkeypatch.setattr(meter, "read", lambda: (1e6, 0.01))  # tokens per second
        return pace.read(10, "tokens", 8.6e8)

    assert read("NVIDIA H100 80GB HBM3")["mfu"] == pytest.approx(8.6e14 / 989e12)
    assert read("NVIDIA H100 PCIe")["mfu"] == pytest.approx(8.6e14 / 756e12)
    assert "mfu" not in read("NVIDIA T4")
    assert read("NVIDIA T4")["peak_memory_gb"] == 5


def test_the_stopwatch_runs_to_the_last_gradient_and_not_on(clock: list[float]) -> None:
    def wait(weight: torch.Tensor) -> None:
        clock[0] += 4  # as DDP does for the other ranks

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
    """Before each of them fsdp's own hook waits for the other ranks."""

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
        take(1)()  # for the loss
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
    meter.add(1, torch.tensor(5.0), 10)
    clock[0] += 2
    with meter.paused():
        clock[0] += 8
    clock[0] += 2
    assert (meter.state(), meter.read()) == ({"loss": 80.0, "terms": 40}, (10.0, 0.0))
    meter.add(2, torch.tensor(3.0), 60)
    clock[0] += 2
    assert (meter.state(), meter.read()) == ({"loss": 180.0, "terms": 60}, (30.0, 0.0))
    assert meter.speed() == pytest.approx(100 / 6)
    assert meter.wall() == 14.0


def test_a_meter_goes_on_from_anothers_sums() -> None:
    whole, before = Meter(), Meter()
    losses = torch.rand(6)
    for step, loss in enumerate(losses[:3]):
        whole.add(step, loss, step + 1)
        before.add(step, loss, step + 1)
    after = Meter(before.state())
    for step, loss in enumerate(losses[3:]):
        whole.add(step, loss, step + 1)
        after.add(step, loss, step + 1)
    assert after.state() == whole.state(), "to the last bit"


def test_the_meter_knows_the_first_loss_that_is_no_number() -> None:
    meter = Meter()
    for step, loss in enumerate((1.0, math.inf, math.nan)):
        meter.add(step, torch.tensor(loss), 1)
    assert not math.isfinite(meter.state()["loss"])
    assert meter.not_finite == (1, math.inf)
