"""The GPUs of this machine as nvidia-smi or rocm-smi tells them. No torch import, and no CUDA."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.preflight import gpu_health
from launcher.preflight.gpu_health import Health

LIMIT_S = 8.0  # in all; a GPU that fell off the bus can make nvidia-smi hang


class GpuError(RuntimeError):
    """There are GPUs, but their tool cannot tell of them."""


class UnknownField(GpuError):
    """This nvidia-smi does not know a field, and refuses the whole question."""


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    index: str
    uuid: str
    memory_errors: int  # uncorrected, since the driver was loaded
    driver: str = ""  # its version
    processes: tuple[str, ...] = ()  # "pid 123 (python)"
    health: Health = field(default_factory=Health)


def visible_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that torch would see, in its order; none on a machine without them.

    Raises GpuError where the machine has some, and they cannot be told or chosen.
    """
    until = time.monotonic() + LIMIT_S
    if shutil.which("nvidia-smi"):
        wanted = environ.get("CUDA_VISIBLE_DEVICES")
        gpus = [*_nvidia_gpus(until)]
        return tuple(gpus if wanted is None else _select(gpus, wanted))
    if not shutil.which("rocm-smi"):
        return ()
    gpus = [*_amd_gpus(until)]
    seen = environ.get("ROCR_VISIBLE_DEVICES")
    if seen is not None:  # HIP counts those that ROCm shows it
        shown = _select(gpus, seen)
        gpus = [replace(gpu, index=str(index)) for index, gpu in enumerate(shown)]
    by_hip, by_cuda = (environ.get(f"{name}_VISIBLE_DEVICES") for name in ("HIP", "CUDA"))
    wanted = by_cuda if by_hip is None else by_hip
    return tuple(gpus if wanted is None else _select(gpus, wanted))


def _nvidia_gpus(until: float) -> Iterator[Gpu]:
    """Yield the GPUs and, of one that is divided, its MIG instances instead."""
    columns = "index,uuid,ecc.errors.uncorrected.volatile.total,driver_version,mig.mode.current"
    try:
        rows = list(_query("gpu", ",".join((columns, *gpu_health.FIELDS)), until))
    except UnknownField:  # an old nvidia-smi: what each of them knows
        rows = list(_query("gpu", columns, until))
    if not rows:
        return
    with ThreadPoolExecutor(1) as pool:  # two questions at once take the time of one
        linked = pool.submit(_nvlinks, until) if len(rows) > 1 else None
        users = list(_query("compute-apps", "gpu_uuid,pid,process_name", until))
    nvlinks = linked.result() if linked else {}
    instances = _mig_instances(until) if any(row[4] == "Enabled" for row in rows) else {}
    for index, uuid, errors, driver, mode, *more in rows:
        gpu = Gpu(
            index=index,
            uuid=uuid,
            memory_errors=int(errors) if errors.isdigit() else 0,  # "[N/A]" without ECC
            driver=driver,
            processes=tuple(f"pid {pid} ({name})" for gpu, pid, name in users if gpu == uuid),
            health=gpu_health.read(more, nvlinks.get(uuid)),
        )
        if mode != "Enabled":
            yield gpu
        for number, instance in enumerate(instances.get(uuid, [])):
            name = f"{index}:{number}"
            yield replace(gpu, index=name, uuid=instance, processes=(), health=Health())


def _nvlinks(until: float) -> dict[str, int]:
    try:
        return gpu_health.count_nvlinks(_run("nvidia-smi", ["nvlink", "--status"], until).stdout)
    except GpuError:
        return {}  # the other question tells of it


def _mig_instances(until: float) -> dict[str, list[str]]:
    """Return the UUIDs of the MIG instances of each GPU, by its own."""
    found: dict[str, list[str]] = {}
    for uuid in re.findall(r"\(UUID: (\S+)\)", _run("nvidia-smi", ["-L"], until).stdout):
        if uuid.startswith("MIG-") and found:
            found[[*found][-1]].append(uuid)
        else:
            found[uuid] = []
    return found


def _amd_gpus(until: float) -> Iterator[Gpu]:
    told = _run("rocm-smi", ["--showuniqueid", "--csv"], until)
    if told.returncode != 0 and Path("/dev/kfd").exists():
        raise GpuError(f"rocm-smi: {' '.join((told.stdout + told.stderr).split())}")
    ids = re.findall(r"^card\d+,(?:0x)?([^,\s]*)", told.stdout, re.MULTILINE)
    for index, unique_id in enumerate(ids):
        yield Gpu(str(index), f"GPU-{unique_id}", 0)


def _run(tool: str, words: Sequence[str], until: float) -> subprocess.CompletedProcess[str]:
    try:
        left = until - time.monotonic()
        return subprocess.run([tool, *words], capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired as error:
        raise GpuError(f"{tool} gives no answer in {LIMIT_S:g} s") from error


def _query(table: str, columns: str, until: float) -> Iterator[list[str]]:
    words = [f"--query-{table}={columns}", "--format=csv,noheader,nounits"]
    result = _run("nvidia-smi", words, until)
    if result.returncode == 0:
        for line in result.stdout.splitlines():
            yield [cell.strip() for cell in line.split(",", columns.count(","))]
        return
    said = " ".join((result.stdout + result.stderr).split())
    if "is not a valid field to query" in said:
        raise UnknownField(f"nvidia-smi: {said}")
    if any(Path("/dev").glob("nvidia[0-9]*")):
        raise GpuError(f"nvidia-smi: {said}")


def _select(gpus: Sequence[Gpu], wanted: str) -> Iterator[Gpu]:
    """Yield what a variable names, by index or UUID; as in CUDA, a wrong word ends it."""
    for word in wanted.split(","):
        name = word.strip()
        named = [gpu for gpu in gpus if name and (gpu.index == name or gpu.uuid.startswith(name))]
        if not named:
            return
        yield named[0]
