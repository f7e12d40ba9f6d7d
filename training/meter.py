"""What each rank measures: its loss, its speed, and its own compute time."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from distributed import torch as helper
from distributed.errors import with_fault

SLOW = 1.2  # times the median rank's compute time; no clock is exact, and 1.3 must be reported
SLOW_STEPS = 50  # a rank must be slow for this many steps to be reported
LEAST_S = 0.01  # of compute time per step, for a rank to be reported
WARM_UP = 2  # readings; in the second, DDP orders its buckets, and ranks wait while they compute
# Dense bfloat16 operations per second, by a part of the GPU's name (NVIDIA's data sheets).
PEAKS = {
    "H100 PCIe": 756e12,  # before H100, which is a part of its name
    "H100 NVL": 836e12,
    "H200 NVL": 836e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
_log = logging.getLogger(__name__)


class Meter:
    """Measures one rank's loss and speed; it waits for the device only when it is read."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._paused_s = 0.0
        self._loaded_s = 0.0  # loading, since the last reading
        self._new = list[tuple[int, Tensor, int]]()  # step, loss, terms
        self._sums = {"loss": 0.0, "terms": 0}  # since the last reading
        self._terms = 0  # since the start of this process
        self._read_s = 0.0  # training time at the last reading
        self._read_terms = 0  # terms at the last reading
        self.not_finite: tuple[int, float] | None = None  # step and value of the first such loss

    def wall(self) -> float:
        """Return the seconds since the meter was created, pauses included."""
        return time.perf_counter() - self._start

    def add(self, step: int, loss: Tensor, terms: int) -> None:
        """Add one micro-batch: its mean loss, one number of any shape, over a number of terms."""
        self._new.append((step, loss.detach().view(()), terms))

    def state_dict(self) -> dict[str, float]:
        """Return sums of loss and terms since the last reading; waits for the device."""
        self._add_up()
        return dict(self._sums)

    def _add_up(self) -> None:
        """Add the new losses to the sums, and record the first that is not finite.

        Waits for the device.
        """
        losses = [loss for _, loss, _ in self._new]
        values = torch.stack(losses).tolist() if losses else []  # waits for the device
        for (step, _, terms), value in zip(self._new, values, strict=True):
            self._sums["loss"] += value * terms
            self._sums["terms"] += terms
            self._terms += terms
            if not math.isfinite(value) and self.not_finite is None:
                self.not_finite = step, value
        self._new.clear()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue another meter's sums."""
        self._sums = dict(state)

    def exit_not_finite(self, step: int, rank: int, describe: Callable[[int], str]) -> NoReturn:
        """Raise FloatingPointError on the rank with the earliest loss that is not finite.

        All ranks must call this. The others wait until the launcher ends them, or exit with 1. If
        every loss up to this step is finite, a weight is not, and rank 0 reports it. `describe(n)`
        returns the samples of the step n steps ago.
        """
        first, value = self.not_finite or (step + 1, 0.0)
        steps = helper.gather_json(first)

        if rank == steps.index(min(steps)):
            if first > step:
                cause = f"a weight is not finite after step {step}"
            else:
                cause = f"the loss at step {first} is {value} on rank {rank}"
                if samples := describe(step - first):
                    cause += f", for {samples}"
            cause += "; try a lower train.learning_rate, and check the data of that step"
            raise with_fault(FloatingPointError, "loss-not-finite", cause)

        with contextlib.suppress(RuntimeError):
            helper.barrier()  # until the launcher ends this rank
        helper.finish(1)

    def read(self) -> tuple[float, float]:
        """Start a new reading; returns the last one: terms per second, share of time for data.

        Resets the sums of state_dict(). Waits for the device.
        """
        self._add_up()
        seconds = self.wall() - self._paused_s - self._read_s
        terms = self._terms - self._read_terms
        found = terms / seconds, self._loaded_s / seconds

        self._read_s += seconds
        self._read_terms = self._terms
        self._sums = {"loss": 0.0, "terms": 0}
        self._loaded_s = 0.0
        return found

    def speed(self) -> float:
        """Return the terms per second of training time, up to the last reading; 0 without one."""
        return self._read_terms / self._read_s if self._read_s else 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the body from the speed."""
        start = self.wall()
        yield
        self._paused_s += self.wall() - start

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Count the body as time spent on data."""
        start = self.wall()
        yield
        self._loaded_s += self.wall() - start


class Stopwatch:
    """Times a rank's own computation: from a batch to the last gradient, the first parameter's.

    DDP waits for other ranks only after that, and for rank 0's buffers before a forward pass. Ranks
    that share a model wait before each of its blocks, so their time is that of the blocks' forward
    passes, the last one up to the loss. The stopwatch waits for a GPU only when it is read.
    Creating it adds hooks to the model.
    """

    def __init__(self, model: nn.Module) -> None:
        first = next((each for each in model.parameters() if each.requires_grad), None)
        self._is_cuda = first is not None and first.is_cuda
        self._spans = list[tuple[Any, Any]]()  # times, or a GPU's events
        if helper.is_sharded(model):
            for block in [*helper.blocks(model)] or [model]:  # after fsdp's own hooks, which wait
                block.register_forward_pre_hook(self._start)
                block.register_forward_hook(self._stop)
        elif first is not None:
            # The first parameter's gradient is the last to be computed.
            first.register_hook(self._stop)  # type: ignore[no-untyped-call]
            model.register_forward_pre_hook(self._stop)  # DDP sends buffers in between
            helper.unwrap(model).register_forward_pre_hook(self._start)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_spans": []}  # the model, with these hooks, may be copied or pickled

    def _now(self) -> Any:
        """Return the time in seconds or, on a GPU, an event in its stream; waits for nothing."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Time the body, a forward pass, and the backward pass that follows."""
        self._start()
        yield
        self._stop()

    def _start(self, *_: object) -> None:
        """Begin a span here, of no length yet; the arguments are those of a hook."""
        now = self._now()
        self._spans.append((now, now))

    def _stop(self, *_: object) -> None:
        """End the newest span here; a later call moves its end."""
        if self._spans:
            start, _end = self._spans[-1]
            self._spans[-1] = start, self._now()

    def read(self) -> float:
        """Start a new reading; returns the seconds of the previous one."""
        spans = self._spans
        self._spans = []
        if not self._is_cuda:
            return math.fsum(end - start for start, end in spans)
        torch.cuda.synchronize()
        return math.fsum(start.elapsed_time(end) for start, end in spans) / 1000


def peak_memory() -> int:
    """Return in bytes the most memory that this rank has used: of its GPU or, without one, RAM."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Pace:
    """Compares how fast the ranks compute, and reports a slow one. All ranks must use it."""

    def __init__(self, meter: Meter, stopwatch: Stopwatch) -> None:
        self.hosts: list[str] = helper.gather_json(os.uname().nodename)
        self._meter = meter
        self._stopwatch = stopwatch
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        self._peak = next((peak for part, peak in PEAKS.items() if part in gpu), 0.0)  # 0: unknown
        self._read_steps: collections.deque[int] = collections.deque(maxlen=WARM_UP)
        # The first step of a reading, and each rank's time divided by the median rank's.
        self._ratios: collections.deque[tuple[int, Sequence[float]]] = collections.deque()
        self._named = set[int]()

    def read(self, step: int, unit: str, flops: float) -> dict[str, float]:
        """Start a new reading; returns the total speed, and the worst rank's other measurements.

            <unit>_per_second   of all ranks together
            data_wait           the share of time spent on data
            mfu                 the share of the GPUs' peak performance (Chowdhery et al. 2022);
                                only if the peak and `flops`, the operations per term, are known
            peak_memory_gb      in 10^9 bytes
            slowest             see `compare_and_warn`; only with several ranks, after the warm-up

        All ranks must call this.
        """
        ranks = helper.gather_json([*self._meter.read(), peak_memory(), self._stopwatch.read()])
        speeds, loading, memory, computing = zip(*ranks, strict=True)

        found = {f"{unit}_per_second": sum(speeds), "data_wait": max(loading)}
        if flops and self._peak:
            found["mfu"] = sum(speeds) * flops / (self._peak * len(ranks))
        found["peak_memory_gb"] = max(memory) / 1e9
        if len(self._read_steps) >= WARM_UP and len(ranks) > 1:
            found["slowest"] = self.compare_and_warn(self._read_steps[-1], step, computing)
        self._read_steps.append(step)
        return found

    def compare_and_warn(self, start: int, step: int, seconds: Sequence[float]) -> float:
        """Add the seconds that each rank computed in these steps; warn once of each slow rank.

        Returns the slowest rank's time divided by the median rank's: a median over the readings of
        the last 50 steps, because a hiccup affects few of them.
        """
        middle = statistics.median_low(seconds)
        self._ratios.append((start, [own / middle for own in seconds]))
        while len(self._ratios) > 1 and step - self._ratios[1][0] >= SLOW_STEPS:
            self._ratios.popleft()

        readings = [ratios for _, ratios in self._ratios]
        medians = [statistics.median(of_one_rank) for of_one_rank in zip(*readings, strict=True)]
        ratio = max(medians)
        rank = medians.index(ratio)
        oldest, _ = self._ratios[0]
        steps = step - oldest
        is_long = middle >= LEAST_S * (step - start)  # otherwise clock noise decides
        is_pair = len(seconds) <= 2  # of two ranks, only one can be slow
        is_new = not self._named if is_pair else rank not in self._named

        if ratio > SLOW and steps >= SLOW_STEPS and is_long and is_new:
            self._named.add(rank)
            of = "the other rank" if is_pair else "the median rank"
            cause = f"rank {rank} on {self.hosts[rank]} takes {ratio:.2f}x the compute time of {of}"
            _log.warning(
                f"warning: {cause}, over {steps} steps; "
                "look at that node's clocks, temperature and other programs [slow-rank]"
            )
        return float(ratio)
