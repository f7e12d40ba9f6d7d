"""What makes a GPU slow, as nvidia-smi tells it: throttled clocks, few lanes, missing NVLinks.

A GPU is compared only with the others of its model. What nvidia-smi does not know is not judged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

FIELDS = (  # of --query-gpu; `clocks_throttle_reasons` is also known to drivers that say `event`
    *("name", "memory.used", "memory.total", "clocks_throttle_reasons.active"),
    *("clocks.applications.graphics", "clocks.max.graphics"),
    *("pcie.link.width.current", "pcie.link.width.max"),
)
# Bits of NVML's nvmlClocksEventReasons. The others are no faults: idle, the power cap, settings.
SLOWDOWNS = {
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
LEAST_TAKEN_MIB = 1024  # a desktop's own windows take less; so does an idle GPU's driver
LEAST_TAKEN = 0.05  # of the memory: CPUs that share a GPU's memory keep some of it
TOLERANCE = 0.05  # cards of one model from two vendors differ a little in their clocks


@dataclass(frozen=True)
class Health:
    """What nvidia-smi says of one GPU; None is not known."""

    model: str = ""
    used_mib: int | None = None
    total_mib: int | None = None
    reasons: int | None = None  # bits: why its clocks are low
    clock_mhz: int | None = None  # at which applications run
    max_clock_mhz: int | None = None
    lanes: int | None = None  # of PCIe
    max_lanes: int | None = None
    nvlinks: int | None = None  # active ones

    @property
    def is_taken(self) -> bool:
        """Whether someone uses a part of its memory that matters."""
        used = self.used_mib or 0
        return used >= max(LEAST_TAKEN_MIB, LEAST_TAKEN * (self.total_mib or 0))


def read(cells: Sequence[str], nvlinks: int | None) -> Health:
    """Return what nvidia-smi says to FIELDS; nothing, if it refused to."""
    if not cells:
        return Health(nvlinks=nvlinks)
    used, total, reasons, clock, max_clock, lanes, max_lanes = map(_number, cells[1:])
    return Health(cells[0], used, total, reasons, clock, max_clock, lanes, max_lanes, nvlinks)


def _number(text: str) -> int | None:
    """Read "16" or "0x0000000000000008"; None for "[N/A]" and the like."""
    try:
        return int(text, 0)
    except ValueError:
        return None


def count_nvlinks(status: str) -> dict[str, int]:
    """Return how many NVLinks of each GPU are active, by UUID: `nvidia-smi nvlink --status`."""
    found: dict[str, int] = {}
    for line in status.splitlines():
        if gpu := re.search(r"\(UUID: (\S+)\)", line):
            found[gpu[1]] = 0
        elif found and line.endswith("GB/s"):  # else "<inactive>"
            found[[*found][-1]] += 1
    return found


def find_slow(gpus: Mapping[str, Health]) -> Iterator[str]:
    """Yield what slows a GPU down, and what it has otherwise than others of its model, by index."""
    narrow: dict[str, list[str]] = {}
    for index, gpu in gpus.items():
        if reasons := [name for bit, name in SLOWDOWNS.items() if (gpu.reasons or 0) & bit]:
            yield f"GPU {index} is throttled ({', '.join(reasons)})"
        if gpu.lanes and gpu.max_lanes and gpu.lanes < gpu.max_lanes:
            narrow.setdefault(f"{gpu.lanes} of {gpu.max_lanes}", []).append(index)
    yield from (f"{_have(indices)} {lanes} PCIe lanes" for lanes, indices in narrow.items())
    for model in dict.fromkeys(gpu.model for gpu in gpus.values()):
        alike = {index: gpu for index, gpu in gpus.items() if gpu.model == model}
        full = {index: gpu for index, gpu in alike.items() if gpu.lanes == gpu.max_lanes}
        yield from _odd({i: gpu.clock_mhz for i, gpu in alike.items()}, "{} MHz for applications")
        yield from _odd({i: gpu.max_clock_mhz for i, gpu in alike.items()}, "at most {} MHz")
        yield from _odd({i: gpu.lanes for i, gpu in full.items()}, "{} PCIe lanes")
        yield from _odd(_linked({i: gpu.nvlinks for i, gpu in alike.items()}), "{} active NVLinks")


def _odd(values: Mapping[str, int | None], what: str) -> Iterator[str]:
    """Yield which GPUs differ from most others; of two values that are as frequent, the lower."""
    counts = Counter(value for value in values.values() if value is not None)
    usual = max(counts, key=lambda value: (counts[value], value), default=0)
    for value in counts:
        if abs(value - usual) > TOLERANCE * usual:
            indices = [index for index, one in values.items() if one == value]
            yield f"{_have(indices)} {what.format(value)}, others of the model have {usual}"


def _linked(nvlinks: Mapping[str, int | None]) -> Mapping[str, int | None]:
    """Leave out GPUs without NVLinks, unless they are few: bridges join two cards, not all."""
    bare = [index for index, links in nvlinks.items() if links == 0]
    if 3 * len(bare) < len(nvlinks):
        return nvlinks
    return {index: links for index, links in nvlinks.items() if links}


def _have(indices: Sequence[str]) -> str:
    return f"GPU {indices[0]} has" if len(indices) == 1 else f"GPUs {', '.join(indices)} have"
