"""Save a snapshot that the node agent holds as an ordinary checkpoint."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributed import checkpoint_files as files
from distributed.lock import RunLock
from distributed.snapshot import Buffer, Snapshot, merge
from launcher.agent.output import say

_POLL_S = 0.02


def save(files: Sequence[int], folder_name: str = "") -> int:
    """Save a snapshot, of which each rank's part is in a file or comes to the folder of that name.

    Returns an exit code.
    """
    step = Buffer(files[0]).header().step
    try:
        parts = _read(files)
        if folder_name and parts:
            parts |= _await_parts(parts, folder_name)
        if parts and len(parts) == parts[min(parts)].holders:
            return _commit(merge([part for _, part in sorted(parts.items())]))
        why = "it is damaged"
    except Exception as error:
        why = str(error) or repr(error)
    say(f"warning: step {step}, in memory, was not saved: {why}")
    return 1


def hand_over(files: Sequence[int], folder_name: str) -> int:
    """Write parts of a snapshot to a folder for the first node's agent; returns an exit code."""
    for one in map(Buffer, files):
        if rest := one.about():
            folder = Path(rest["folder"], folder_name)
            folder.mkdir(parents=True, exist_ok=True)
            place = folder / str(one.header().rank)
            shutil.copyfile(f"/proc/self/fd/{one.fd}", temporary := f"{place}.{os.getpid()}")
            os.replace(temporary, place)
    return 0


def _read(files: Sequence[int]) -> dict[int, Snapshot]:
    """Return the parts that are whole, by rank."""
    found: dict[int, Snapshot] = {}
    for one in map(Buffer, files):
        if one.header().rank not in found and (rest := one.about()):
            found[one.header().rank] = one.read(rest)
    return found


def _await_parts(parts: Mapping[int, Snapshot], name: str) -> dict[int, Snapshot]:
    """Wait for the other ranks' parts."""
    one = next(iter(parts.values()))
    places = [Path(one.folder, name, str(rank)) for rank in {*range(one.holders)} - {*parts}]
    while not all(place.exists() for place in places):
        time.sleep(_POLL_S)  # the agent ends this process when its time is over
    return _read([os.open(place, os.O_RDONLY) for place in places])


def _commit(taken: Snapshot) -> int:
    folder = Path(taken.folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder, f"run {folder.name}")
    if taken.step <= max(map(files.step_of, files.steps(folder)), default=0):
        return 1
    with lock.committing():
        files.delete_leftovers(folder)
    temporary = folder / f"step-{taken.step}.tmp-{socket.gethostname()}-{os.getpid()}"
    temporary.mkdir()
    try:
        tensors = {**taken.fetch(taken.trees), "ranks": taken.ranks}
        files.write(temporary, tensors, taken.progress, {})
        with lock.committing():
            files.commit(temporary, folder / f"step-{taken.step}")
            files.prune(folder, taken.step, taken.keep_last)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # frees its space
        raise
    say(f"step {taken.step} was only in memory; it is now saved in {folder}")
    return 0
