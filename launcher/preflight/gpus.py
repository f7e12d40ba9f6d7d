"""The GPUs of this machine as nvidia-smi or rocm-smi reports them, and what makes one slow.

The reasons are throttled clocks, too few PCIe lanes and missing NVLinks. A GPU is compared
only with others of its model; values that nvidia-smi does not report are not judged. torch is not
used, and libcuda only tells its version.
"""

import contextlib
import ctypes
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.text import Environ
from launcher.wire import limits

DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of NVIDIA, of AMD, and of both under WSL
NUMBERS = {  # fields of Gpu, and their names in --query-gpu
    "used_mib": "memory.used",
    "total_mib": "memory.total",
    "reasons": "clocks_throttle_reasons.active",  # drivers that call it `event` also accept this
    "lanes": "pcie.link.width.current",
    "max_lanes": "pcie.link.width.max",
}
# Bits of NVML's nvmlClocksEventReasons. The others are not faults: idle, power cap, settings.
SLOWDOWNS = {
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
LEAST_TAKEN_MIB = 1024  # a desktop uses less, and so does the driver of an idle GPU
LEAST_TAKEN = 0.05  # a fraction of the memory; a CPU that shares the memory uses some


class GpuError(RuntimeError):
    """There are GPUs, but their tool cannot report them."""


class UnknownField(GpuError):
    """This nvidia-smi does not know a field, and rejects the entire query."""


@dataclass(frozen=True)
class Gpu:
    """One GPU; a value is None if its tool does not report it."""

    index: str
    uuid: str
    memory_errors: int  # uncorrected, since the driver was loaded
    driver: str = ""  # its version
    processes: tuple[str, ...] = ()  # "pid 123 (python)"
    model: str = ""
    used_mib: int | None = None
    total_mib: int | None = None
    reasons: int | None = None  # bits: why its clocks are low
    lanes: int | None = None  # of PCIe
    max_lanes: int | None = None
    nvlinks: int | None = None  # active ones

    @property
    def is_taken(self) -> bool:
        """Whether a significant part of its memory is in use."""
        return (self.used_mib or 0) >= max(LEAST_TAKEN_MIB, LEAST_TAKEN * (self.total_mib or 0))


def visible_gpus(environ: Environ) -> tuple[Gpu, ...]:
    """Return the GPUs that torch would see, in its order; none on a machine without them.

    Waits up to NVIDIA_SMI_S for their tool. Raises GpuError if the machine has GPUs, but the tool
    cannot report them.
    """
    until = time.monotonic() + limits.NVIDIA_SMI_S
    wanted = environ.get("CUDA_VISIBLE_DEVICES")

    if shutil.which("nvidia-smi"):
        gpus = [*_nvidia_gpus(until)]
    elif shutil.which("rocm-smi"):
        gpus = [*_amd_gpus(until)]
        seen = environ.get("ROCR_VISIBLE_DEVICES")
        if seen is not None:  # HIP numbers only those that ROCm shows
            gpus = [replace(gpu, index=str(index)) for index, gpu in enumerate(_select(gpus, seen))]
        wanted = environ.get("HIP_VISIBLE_DEVICES", wanted)
    else:
        return ()

    return tuple(gpus if wanted is None else _select(gpus, wanted))


def _nvidia_gpus(until: float) -> Iterator[Gpu]:
    """Yield the GPUs; instead of a GPU that is divided, yield its MIG instances.

    If nvidia-smi is slow, their processes and NVLinks are unknown. Raises GpuError if it cannot
    list them by `until` (monotonic).
    """
    more_until = time.monotonic() + limits.NVIDIA_SMI_MORE_S
    columns = "index,uuid,ecc.errors.uncorrected.volatile.total,driver_version,mig.mode.current"
    mig_mode = 4  # its place among the columns
    try:
        rows = _query("gpu", ",".join((columns, "name", *NUMBERS.values())), until)
    except UnknownField:  # an old nvidia-smi: ask only for what all versions know
        rows = _query("gpu", columns, until)
    if not rows:
        return

    users = list[list[str]]()
    nvlinks = dict[str, int]()
    # Two queries at once take as long as one.
    with ThreadPoolExecutor(1) as pool, contextlib.suppress(GpuError):
        linked = pool.submit(_nvlinks, more_until) if len(rows) > 1 else None
        users = _query("compute-apps", "gpu_uuid,pid,process_name", more_until)
        nvlinks = linked.result() if linked else {}
    instances = _mig_instances(until) if any(row[mig_mode] == "Enabled" for row in rows) else {}

    for index, uuid, errors, driver, mode, *more in rows:  # no more from an old nvidia-smi
        memory_errors = _number(errors) or 0  # "[N/A]" without ECC
        if mode != "Enabled":
            processes = tuple(f"pid {pid} ({name})" for gpu, pid, name in users if gpu == uuid)
            links = nvlinks.get(uuid)
            model, *numbers = more or [""]
            known = dict(zip(NUMBERS, map(_number, numbers), strict=False))
            yield Gpu(index, uuid, memory_errors, driver, processes, model, nvlinks=links, **known)

        for number, instance in enumerate(instances.get(uuid, [])):
            yield Gpu(f"{index}:{number}", instance, memory_errors, driver)


def _number(text: str) -> int | None:
    """Parse "16" or "0x0000000000000008". Returns None for "[N/A]" and similar values."""
    try:
        return int(text, 0)
    except ValueError:
        return None


def _nvlinks(until: float) -> dict[str, int]:
    """Return how many NVLinks of each GPU are active, by UUID. Raises GpuError."""
    active = dict[str, int]()
    for line in _run("nvidia-smi", ["nvlink", "--status"], until).stdout.splitlines():
        if gpu := re.search(r"\(UUID: (\S+)\)", line):
            uuid = gpu[1]
            active[uuid] = 0
        elif active and line.endswith("GB/s"):  # otherwise "<inactive>"
            active[uuid] += 1
    return active


def _mig_instances(until: float) -> dict[str, list[str]]:
    """Return the UUIDs of the MIG instances of each GPU, by the GPU's UUID. Raises GpuError."""
    instances = dict[str, list[str]]()
    gpu = ""
    for uuid in re.findall(r"\(UUID: (\S+)\)", _run("nvidia-smi", ["-L"], until).stdout):
        if uuid.startswith("MIG-") and gpu:
            instances[gpu].append(uuid)
        else:
            gpu = uuid
            instances[gpu] = []
    return instances


def newest_cuda() -> int:
    """Return the newest CUDA that libcuda supports, such as 12080; 0 without libcuda.

    It may come from a cuda-compat package, and be newer than the driver. No GPU is opened.
    """
    version = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _amd_gpus(until: float) -> Iterator[Gpu]:
    """Yield the GPUs, of which only the index and the UUID are known. Raises GpuError."""
    answer = _run("rocm-smi", ["--showuniqueid", "--csv"], until)
    if answer.returncode != 0 and Path("/dev/kfd").exists():
        raise GpuError(f"rocm-smi: {' '.join((answer.stdout + answer.stderr).split())}")
    ids = re.findall(r"^card\d+,(?:0x)?([^,\s]*)", answer.stdout, re.MULTILINE)
    for index, unique_id in enumerate(ids):
        yield Gpu(str(index), f"GPU-{unique_id}", 0)


def _run(tool: str, words: Sequence[str], until: float) -> subprocess.CompletedProcess[str]:
    """Run nvidia-smi or rocm-smi. Raises GpuError if it has not ended by `until` (monotonic)."""
    try:
        left = until - time.monotonic()
        return subprocess.run([tool, *words], capture_output=True, errors="replace", timeout=left)
    except subprocess.TimeoutExpired as error:
        raise GpuError(f"{tool} did not answer within {limits.NVIDIA_SMI_S:g} s") from error


def _query(table: str, columns: str, until: float) -> list[list[str]]:
    """Return the rows of one of nvidia-smi's tables; none if the machine has no NVIDIA GPU.

    Raises UnknownField if nvidia-smi lacks a column, GpuError if it fails although there are GPUs.
    """
    words = [f"--query-{table}={columns}", "--format=csv,noheader,nounits"]
    result = _run("nvidia-smi", words, until)
    if result.returncode == 0:
        lines = (line.split(",", columns.count(",")) for line in result.stdout.splitlines())
        return [[cell.strip() for cell in line] for line in lines]
    why = " ".join((result.stdout + result.stderr).split())
    if "is not a valid field to query" in why:
        raise UnknownField(f"nvidia-smi: {why}")
    if any(Path("/dev").glob("nvidia[0-9]*")):
        raise GpuError(f"nvidia-smi: {why}")
    return []


def _select(gpus: Sequence[Gpu], wanted: str) -> Iterator[Gpu]:
    """Yield the GPUs listed by index or beginning of the UUID, up to the first invalid one.

    CUDA reads its list in this way.
    """
    for word in wanted.split(","):
        name = word.strip()
        named = [gpu for gpu in gpus if name and (gpu.index == name or gpu.uuid.startswith(name))]
        if not named:
            return
        yield named[0]


# --- what makes a GPU slow ----------------------------------------------------------------------


def find_slow(gpus: Sequence[Gpu]) -> Iterator[str]:
    """Yield what slows a GPU down, and how it differs from others of its model."""
    narrow = dict[str, list[str]]()
    for gpu in gpus:
        if reasons := [name for bit, name in SLOWDOWNS.items() if (gpu.reasons or 0) & bit]:
            yield f"GPU {gpu.index} is throttled ({', '.join(reasons)})"
        if gpu.lanes and gpu.max_lanes and gpu.lanes < gpu.max_lanes:
            narrow.setdefault(f"{gpu.lanes} of {gpu.max_lanes}", []).append(gpu.index)
    yield from (f"{_have(indices)} {lanes} PCIe lanes" for lanes, indices in narrow.items())

    for model in dict.fromkeys(gpu.model for gpu in gpus):
        alike = [gpu for gpu in gpus if gpu.model == model]
        full = [gpu for gpu in alike if gpu.lanes == gpu.max_lanes]  # others are reported above
        yield from _describe_odd(full, "lanes", "{} PCIe lanes")
        yield from _describe_odd(_expect_nvlinks(alike), "nvlinks", "{} active NVLinks")


def _describe_odd(gpus: Sequence[Gpu], field: str, what: str) -> Iterator[str]:
    """Yield which GPUs differ from most others in a field, and how.

    `what` is the text for a value. Of equally common values, the lower ones differ.
    """
    values = {gpu.index: getattr(gpu, field) for gpu in gpus}
    counts = Counter(value for value in values.values() if value is not None)
    usual = max(counts, key=lambda value: (counts[value], value), default=0)
    for value in counts:
        if value != usual:
            indices = [index for index, other in values.items() if other == value]
            yield f"{_have(indices)} {what.format(value)}, but others of this model have {usual}"


def _expect_nvlinks(gpus: Sequence[Gpu]) -> Sequence[Gpu]:
    """Return the GPUs that should have NVLinks.

    Those without active ones are omitted, because bridges join only some GPUs. If they are fewer
    than a third, they may be faulty, and are not omitted.
    """
    bare = [gpu for gpu in gpus if gpu.nvlinks == 0]
    if 3 * len(bare) < len(gpus):
        return gpus
    return [gpu for gpu in gpus if gpu.nvlinks]


def _have(indices: Sequence[str]) -> str:
    """Return how a sentence about these GPUs begins: "GPU 1 has", or "GPUs 1, 2 have"."""
    return f"GPU {indices[0]} has" if len(indices) == 1 else f"GPUs {', '.join(indices)} have"
