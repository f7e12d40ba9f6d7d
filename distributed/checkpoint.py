"""Checkpoints: each one whole on disk, verified when read, the same bytes on every rank.

    python -m distributed.checkpoint hash DIR     one SHA-256 over the weights of a checkpoint,
                                                  or of a run's newest, to compare two runs

A run saves in a folder of its own, which only one live run at a time writes to:

    step-200/            model.pt  optimizer.pt  rng.pt  progress.json  manifest.json
    step-400/
    step-600.tmp-1234/   being written, or left over by a process that died: never counts
    latest -> step-400

A checkpoint is written beside the others, flushed to the disk, and only then renamed, so that a
folder with a name of its own is whole. Its manifest holds each file's size and SHA-256: a flipped
bit would load in silence. Needs torch alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import logging
import os
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MANIFEST = "manifest.json"
_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """There is no whole checkpoint where one was asked for; one line that names the damage."""


@dataclass(frozen=True)
class State:
    """All that a run needs to go on as if it had never stopped."""

    model: dict[str, Tensor]  # the user's own module's, not the wrapper's
    optimizer: dict[str, Any]  # as optimizer.state_dict() gives it
    progress: dict[str, Any]  # step, place in the data, and the like: anything JSON can hold
    rng: list[dict[str, Any]]  # each rank's random generators, see rng_state


# --- saving (rank 0 alone) ----------------------------------------------------------------------


def save(run_folder: Path, step: int, state: State, *, keep_last: int) -> Path:
    """Write and commit a checkpoint, delete all whole ones but the newest, and return its folder.

    No other live process may save in the run's folder.

    Raises:
        OSError: the disk is full or not writable; the checkpoints before are untouched.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    for leftover in run_folder.glob("step-*.tmp-*"):
        shutil.rmtree(leftover)
    temporary = run_folder / f"step-{step}.tmp-{os.getpid()}"
    _write(temporary, _encode(state))
    final = run_folder / f"step-{step}"
    _commit(temporary, final)
    whole = [folder for folder in steps(run_folder) if (folder / MANIFEST).exists()]
    for folder in whole[:-keep_last]:
        _delete(folder)
    return final


def _encode(state: State) -> dict[str, bytes]:
    """Return what goes into each file, the manifest apart."""
    content = {"progress.json": json.dumps(state.progress).encode()}
    for name in ("model", "optimizer", "rng"):
        file = io.BytesIO()
        torch.save(getattr(state, name), file)
        content[f"{name}.pt"] = file.getvalue()
    return content


def _write(folder: Path, content: dict[str, bytes]) -> None:
    """Write a new folder, and return when the disk has it."""
    entries = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in content.items()
    }
    manifest = json.dumps({"version": 1, "files": entries}, indent=2).encode()
    folder.mkdir()
    for name, data in {**content, MANIFEST: manifest}.items():
        (folder / name).write_bytes(data)
        _sync(folder / name)
    _sync(folder)


def _commit(temporary: Path, final: Path) -> None:
    """Give a written checkpoint its name, durably, and point `latest` at it."""
    if final.exists():  # damaged, or the run would have gone on from it
        _delete(final)
    temporary.rename(final)
    _sync(final.parent)
    link = final.parent / "latest.tmp"
    link.unlink(missing_ok=True)  # left over by a process that died
    link.symlink_to(final.name)
    link.replace(final.parent / "latest")


def _sync(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's names."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _delete(folder: Path) -> None:
    """Delete a checkpoint; half deleted, it no longer has a checkpoint's name."""
    doomed = folder.with_name(f"{folder.name}.tmp-old")
    folder.rename(doomed)
    shutil.rmtree(doomed)


# --- loading (every rank together) --------------------------------------------------------------


def steps(run_folder: Path) -> list[Path]:
    """Return the committed checkpoints of a run, oldest first. They may still be damaged."""
    found = [path for path in run_folder.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def load(folder: Path) -> State | None:
    """Load one checkpoint, or the newest whole one of a run's folder, on every rank.

    Rank 0 alone reads and decides; the others receive its bytes, so the folder need not be shared.
    Tensors are on the CPU. Returns None where the run has no checkpoint yet.

    Raises:
        CheckpointError: there are checkpoints and all are damaged.
    """
    content: dict[str, bytes] = {}
    outcome: list[Any] = [None]  # the size of each file, none at all, or what is wrong
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            content = _read_newest(folder)
            outcome = [{name: len(data) for name, data in content.items()}]
        except CheckpointError as error:
            outcome = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome)
        if isinstance(outcome[0], dict):
            content = {name: _share(content.get(name), n) for name, n in outcome[0].items()}
    if isinstance(outcome[0], CheckpointError):
        raise outcome[0]
    return _decode(content) if content else None


def _read_newest(folder: Path) -> dict[str, bytes]:
    candidates = [folder] if (folder / MANIFEST).exists() else steps(folder)[::-1]
    damage = []
    for candidate in candidates:
        try:
            return _read(candidate)
        except CheckpointError as error:
            damage.append(str(error))
            _log.warning("%s; the one before it is tried", error)
    if damage:
        raise CheckpointError(f"{damage[0]}; no whole checkpoint is left in {folder}")
    return {}


def _read(folder: Path) -> dict[str, bytes]:
    """Return the content of a checkpoint's files, each just as its manifest says."""
    try:
        entries = json.loads((folder / MANIFEST).read_bytes())["files"]
        content = {name: (folder / name).read_bytes() for name in entries}
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
        changed = [name for name in entries if hashes[name] != entries[name]["sha256"]]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: unreadable ({error})") from None
    if changed:
        name = changed[0]
        sizes = f"{len(content[name])} bytes, once {entries[name].get('size')}"
        raise CheckpointError(f"{folder}/{name}: is not what was written ({sizes}; SHA-256)")
    return content


def _share(content: bytes | None, size: int) -> bytes:
    """Return rank 0's bytes on every rank."""
    where = "cuda" if dist.get_backend() == "nccl" else "cpu"
    if content is None:
        tensor = torch.empty(size, dtype=torch.uint8, device=where)
    else:
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(where)
    dist.broadcast(tensor, 0)
    return _to_bytes(tensor.cpu())


def _decode(content: dict[str, bytes]) -> State:
    tensors = {
        name: torch.load(io.BytesIO(content[f"{name}.pt"]), map_location="cpu", weights_only=True)
        for name in ("model", "optimizer", "rng")
    }
    return State(progress=json.loads(content["progress.json"]), **tensors)


# --- random generators --------------------------------------------------------------------------


def gather_rng_states() -> list[dict[str, Any]]:
    """Return every rank's rng_state on rank 0, and an empty list on the others."""
    if not dist.is_initialized():
        return [rng_state()]
    states: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(rng_state(), states or None)
    return states


def rng_state() -> dict[str, Any]:
    """Return the state of this process's random generators, as torch.save can write it."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Take up an rng_state again. Make `iter(loader)` first: that draws a number too."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


# --- comparing ----------------------------------------------------------------------------------


def weights_hash(weights: dict[str, Tensor]) -> str:
    """Return one SHA-256 over the names, dtypes, shapes and bytes of tensors, in order of name."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(_to_bytes(tensor))
    return digest.hexdigest()


def _to_bytes(tensor: Tensor) -> bytes:
    """Return a copy of a contiguous CPU tensor's memory, without the help of NumPy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] != "hash":
        print("usage: python -m distributed.checkpoint hash DIR", file=sys.stderr)
        return 2
    try:
        found = load(Path(arguments[1]))
        if found is None:
            raise CheckpointError(f"{arguments[1]}: holds no checkpoint")
    except CheckpointError as error:
        print(f"checkpoint: {error}", file=sys.stderr)
        return 2
    print(weights_hash(found.model))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
