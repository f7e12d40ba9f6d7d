"""Load checkpoints on all ranks together, and restore each rank's own state."""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..collectives import broadcast, gather_bytes, own_rank, to_bytes
from ..errors import with_fault
from ..lock import is_locked_here, update_link
from .files import (
    FILES,
    INDEX,
    CheckpointError,
    Ranks,
    as_checkpoint_error,
    candidates,
    pack,
    parse_file,
    read_files,
    set_aside,
    step_of,
    steps,
)
from .saver import State, wait_for_saves
from .snapshots import Snapshot, recover_snapshot

_log = logging.getLogger(__name__)


def load(folder: Path | str, *, whole: bool = True) -> State | None:
    """Load one checkpoint, or a run's newest intact one, on every rank. All ranks must call this.

    Waits for this process's saves. Rank 0 reads the files and sends them to the other ranks, so
    the folder need not be shared. Only the parts of a sharded checkpoint are read by every rank:
    now or, if not `whole`, later with `State.fetch`. After a restart, a newer snapshot in memory is
    loaded instead. Tensors are on the CPU. Returns None if there is no checkpoint yet.

    Rank 0 logs a warning for each damaged checkpoint and, if it has already created its Saver,
    renames those that are newer than the one it loads. Raises CheckpointError on every rank if all
    are damaged, and on this rank if its node cannot read a sharded one.
    """
    folder = Path(folder)
    wait_for_saves()
    snapshot = recover_snapshot(folder)
    found = _read_newer(folder, snapshot) if own_rank() == 0 else _Found(folder, {})

    # Rank 0 sends what it has found, but not the parts: each rank reads these itself.
    names = [name for name, data in found.content.items() if data]
    damage, path, names, is_snapshot = broadcast(
        [found.damage, str(found.folder), names, found.is_snapshot]
    )
    content = {name: _broadcast(found.content.get(name)) for name in names}

    if damage:
        raise with_fault(
            CheckpointError,
            "checkpoint-damaged",
            f"{damage}; move it away, or use another RUN_ID",
        )
    if not content:
        return None

    # Rank 0 has parsed a checkpoint already.
    state = replace(found.state or _parse_state(Path(path), content), is_snapshot=is_snapshot)
    if is_snapshot and snapshot is not None and snapshot.holders > 1:
        state = replace(state, fetch=snapshot.fetch)
    return replace(state, **state.fetch(state.trees())) if whole else state


class _Found(NamedTuple):
    """What rank 0 loads: a checkpoint, a snapshot, or nothing."""

    folder: Path  # the checkpoint's; without one, as given
    content: dict[str, bytes]  # of each file
    state: State | None = None  # the same, if it has been parsed
    damage: str = ""  # set if there are only damaged checkpoints
    is_snapshot: bool = False


def _read_newer(folder: Path, snapshot: Snapshot | None) -> _Found:
    """Return the newest intact checkpoint, or the snapshot if that is of a later step.

    If it reads checkpoints, it repairs the folder, as _read_and_repair does.
    """
    if snapshot is None:
        return _read_and_repair(folder)
    if any(step_of(one) >= snapshot.step for one in steps(folder)):  # otherwise, read nothing
        found = _read_and_repair(folder)
        if found.content and step_of(found.folder) >= snapshot.step:
            return found
    return _Found(folder, snapshot.as_files(), is_snapshot=True)


def _read_and_repair(folder: Path) -> _Found:
    """Return the newest intact checkpoint or, if none is intact, the damage.

    Logs a warning for each damaged one. If this process holds the run's lock, it renames those that
    are newer than the intact one, and points `latest` at that.
    """
    damaged = dict[Path, str]()
    for candidate in candidates(folder):
        try:
            content = read_files(candidate)
            state = _parse_state(candidate, content)
        except CheckpointError as error:
            damaged[candidate] = str(error)
            _log.warning("%s; trying the previous checkpoint", error)
            continue

        if damaged and is_locked_here(folder):
            update_link(folder / "latest", candidate.name)
            for one in damaged:
                set_aside(one, "damaged")
        return _Found(candidate, content, state)

    cause = next(iter(damaged.values()), "")
    if cause:
        cause += f", and no intact checkpoint is left in {folder}"
    return _Found(folder, {}, damage=cause)


def _parse_state(folder: Path, content: dict[str, bytes]) -> State:
    """Return the state in a checkpoint's files. Raises CheckpointError if they hold none."""
    found = {Path(name).stem: parse_file(folder, name, content[name]) for name in FILES}
    with as_checkpoint_error(f"{folder}: unreadable"):
        state = State(**{**found, "ranks": Ranks(found["ranks"])})
    if INDEX in content:
        from .sharded import make_reader

        return replace(state, fetch=make_reader(folder, content[INDEX]))
    return state


def _broadcast(data: bytes | None) -> bytes:
    """Return rank 0's bytes, which are not empty, on every rank; other ranks may pass None."""
    sent = broadcast(data and torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return data or to_bytes(sent)


def gather_ranks(own: dict[str, Any]) -> Ranks:
    """Return every rank's dictionary on rank 0, in order of rank, and no items on the others.

    All ranks must call this.
    """
    gathered = gather_bytes(pack(own))
    return Ranks(gathered if own_rank() == 0 else [])


def rng_state() -> dict[str, Any]:
    """Return the state of this process's random generators, in types that torch.load accepts.

    These are Python's, torch's, that of the current GPU, and NumPy's if it is imported.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore an rng_state(), apart from generators that this process does not have.

    Call `iter(loader)` first, because that may use the generator.
    """
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


def weights_hash(weights: dict[str, Tensor]) -> str:
    """Return one SHA-256 over the names, dtypes, shapes and bytes of tensors, sorted by name.

    Raises TypeError for a DTensor, as in the state_dict() of a sharded model: this rank holds only
    a part of it. Pass its `full_tensor()`, which all ranks must call.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        if hasattr(tensor, "full_tensor"):
            raise TypeError(f"{name} is a DTensor; pass its full_tensor(), called on all ranks")
        content = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {content.dtype} {list(content.shape)}\n".encode())
        digest.update(to_bytes(content))
    return digest.hexdigest()
