"""The GPUs of this machine as nvidia-smi tells them. No torch import, and CUDA is not touched."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 8.0  # in all; a GPU that fell off the bus can make nvidia-smi hang


class GpuError(RuntimeError):
    """There are GPUs, but nvidia-smi cannot tell of them."""


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    index: str
    uuid: str
    memory_errors: int  # uncorrected, since the driver was loaded
    driver: str = ""  # its version
    processes: tuple[str, ...] = ()  # "pid 123 (python)"


def visible_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA would show, in its order; none on a machine without them.

    Raises GpuError where the machine has some and nvidia-smi fails.
    """
    if not shutil.which("nvidia-smi"):
        return ()
    until = time.monotonic() + LIMIT_S
    rows = list(
        _query("gpu", "index,uuid,ecc.errors.uncorrected.volatile.total,driver_version", until)
    )
    users = list(_query("compute-apps", "gpu_uuid,pid,process_name", until)) if rows else []
    gpus = [
        Gpu(
            index=index,
            uuid=uuid,
            memory_errors=int(errors) if errors.isdigit() else 0,  # "[N/A]" without ECC
            driver=driver,
            processes=tuple(f"pid {pid} ({name})" for gpu, pid, name in users if gpu == uuid),
        )
        for index, uuid, errors, driver in rows
    ]
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(gpus if wanted is None else _select(gpus, wanted))


def _query(table: str, columns: str, until: float) -> Iterator[list[str]]:
    command = ["nvidia-smi", f"--query-{table}={columns}", "--format=csv,noheader,nounits"]
    try:
        left = until - time.monotonic()
        result = subprocess.run(command, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired as error:
        raise GpuError(f"nvidia-smi gives no answer in {LIMIT_S:g} s") from error
    if result.returncode == 0:
        for line in result.stdout.splitlines():
            yield [cell.strip() for cell in line.split(",", columns.count(","))]
    elif any(Path("/dev").glob("nvidia[0-9]*")):
        raise GpuError(f"nvidia-smi: {' '.join((result.stdout + result.stderr).split())}")


def _select(gpus: Sequence[Gpu], wanted: str) -> Iterator[Gpu]:
    """Yield what CUDA_VISIBLE_DEVICES names, by index or UUID; as in CUDA, a wrong word ends it."""
    for word in wanted.split(","):
        name = word.strip()
        named = [gpu for gpu in gpus if name and (gpu.index == name or gpu.uuid.startswith(name))]
        if not named:
            return
        yield named[0]
