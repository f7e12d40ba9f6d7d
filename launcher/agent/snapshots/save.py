"""Save the node agent's snapshot as an ordinary checkpoint."""

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from distributed.checkpoint import files
from distributed.checkpoint.snapshots import Buffer, Snapshot, join, named_tensors
from distributed.lock import lock_run
from launcher.agent.output.stream import say


def save(fds: Sequence[int], attempt: int, folder_name: str = "") -> int:
    """Save a snapshot whose parts, one per rank, are in these files and, if given, in a folder.

    That folder is in the run's checkpoint folder, and is deleted afterwards. `attempt` is the
    run's, which counts for the lock. Returns an exit code: 1 if a part is missing or damaged or
    cannot be saved, after a warning that says why; also 1, silently, if a checkpoint is as new.
    """
    step = Buffer(fds[0]).header().step if fds else -1
    why = "it is damaged"
    try:
        parts = _read(fds)
        if parts and folder_name:
            parts |= _take_from_folder(parts, folder_name)
        in_order = [parts[rank] for rank in sorted(parts)]
        if in_order and len(in_order) == in_order[0].holders:
            return _commit(_merge(in_order), attempt)
    except Exception as error:
        why = str(error) or repr(error)

    say(f"warning: the snapshot of step {step} in memory was not saved: {why}")
    return 1


def hand_over(fds: Sequence[int], folder_name: str) -> int:
    """Write parts of a snapshot to a folder for node rank 0's agent. Returns an exit code.

    It is 1, after a warning, if a part is damaged or cannot be written.
    """
    try:
        for buffer in map(Buffer, fds):
            if (rest := buffer.about()) is None:
                raise ValueError("it is damaged")
            folder = Path(rest["folder"], folder_name)
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(f"/proc/self/fd/{buffer.fd}", folder / str(buffer.header().rank))
    except Exception as error:
        say(f"warning: this node's part of the snapshot could not be written: {error}")
        return 1
    return 0


def _read(fds: Sequence[int]) -> dict[int, Snapshot]:
    """Return the intact parts, by rank."""
    parts = dict[int, Snapshot]()
    for buffer in map(Buffer, fds):
        if buffer.header().rank not in parts and (rest := buffer.about()):
            parts[buffer.header().rank] = buffer.read(rest)
    return parts


def _take_from_folder(parts: Mapping[int, Snapshot], name: str) -> dict[int, Snapshot]:
    """Read the parts that `parts` lacks from a folder, and delete it. Returns them by rank.

    A damaged part is left out. Raises OSError if one is missing.
    """
    part = parts[min(parts)]
    folder = Path(part.folder, name)
    others = dict[int, Snapshot]()
    try:
        for rank in {*range(part.holders)} - {*parts}:
            with (folder / str(rank)).open("rb") as file:  # closed before deletion, for NFS
                others |= _read([file.fileno()])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return others


def _merge(parts: Sequence[Snapshot]) -> Snapshot:
    """Join the parts of a snapshot, in order of rank, into one that a single rank holds."""
    wholes = dict(named_tensors(parts[0].trees))
    contents = {
        name: join([part.contents[name] for part in parts], wholes[name])
        for name in parts[0].shared
    }
    return replace(parts[0], holders=1, contents={**parts[0].contents, **contents}, shared=set())


def _commit(taken: Snapshot, attempt: int) -> int:
    """Write a complete snapshot as a checkpoint. Returns 0, or 1 if one as new is there.

    Takes over the lock of an earlier `attempt`. Also deletes what interrupted saves have left, and
    old checkpoints beyond `keep_last`. Raises Refused if another live process has the checkpoint
    folder, OSError if it is not writable.
    """
    folder = Path(taken.folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_run(folder, attempt=attempt)
    if taken.step <= max(map(files.step_of, files.steps(folder)), default=0):
        return 1

    with lock.committing():
        files.delete_leftovers(folder)
    temporary = folder / f"step-{taken.step}.tmp-{socket.gethostname()}-{os.getpid()}"
    temporary.mkdir()

    try:
        tensors = {**taken.fetch(taken.trees), "ranks": taken.ranks}
        files.write_files(temporary, tensors, taken.progress, {})
        with lock.committing():
            files.commit(temporary, folder / f"step-{taken.step}")
            files.prune(folder, taken.step, taken.keep_last)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # frees its space
        raise

    say(f"step {taken.step} was only in memory; it is now saved in {folder}")
    return 0
