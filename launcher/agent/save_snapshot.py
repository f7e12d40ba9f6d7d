"""Save a snapshot that the node agent holds as an ordinary checkpoint."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from distributed import checkpoint_files as files
from distributed.lock import RunLock
from distributed.snapshot import Buffer, Snapshot, merge
from launcher.agent.output import say


def save(descriptors: Sequence[Sequence[int]], step: int) -> int:
    """Save a snapshot of which each rank's part is in one of its files; returns an exit code."""
    parts: list[Snapshot] = []
    try:
        for of_rank in descriptors:
            held = (one for one in map(Buffer, of_rank) if one.header().step == step)
            parts += [one.read(rest) for one in held if (rest := one.about())][:1]
        if parts and len(parts) == parts[0].holders:
            return _commit(merge(parts))
        why = "it is damaged"
    except Exception as error:
        why = str(error) or repr(error)
    say(f"warning: step {step}, in memory, was not saved: {why}")
    return 1


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
