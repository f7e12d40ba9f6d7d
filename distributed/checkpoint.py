"""Checkpoints: each one whole on disk, verified when read, the same bytes on every rank.

    python -m distributed.checkpoint hash DIR     one SHA-256 over the weights of a checkpoint,
                                                  or of a run's newest, to compare two runs

A run saves in a folder of its own, which only one live run at a time writes to:

    step-200/            model.pt  optimizer.pt  progress.json  rng.json  manifest.json
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
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

MANIFEST = "manifest.json"
LATEST = "latest"
_STEP = re.compile(r"step-(\d+)")
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
    """Write, commit and announce a checkpoint, and delete those that are too old.

    Args:
        run_folder: made if need be; no other live process may save there.
        keep_last: how many whole checkpoints stay.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the disk is full or not writable; the checkpoints before are untouched.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(run_folder)
    temporary = run_folder / f"step-{step}.tmp-{os.getpid()}"
    write(temporary, state)
    final = commit(temporary, run_folder / f"step-{step}")
    prune(run_folder, keep_last)
    return final


def write(folder: Path, state: State) -> None:
    """Write a new folder, and return when the disk has it."""
    folder.mkdir()
    files = {}
    for name in ("model", "optimizer"):
        with _create(folder / f"{name}.pt") as file:
            torch.save(getattr(state, name), file)  # type: ignore[arg-type]
        files[f"{name}.pt"] = file.entry()
    for name in ("progress", "rng"):
        with _create(folder / f"{name}.json") as file:
            file.write(json.dumps(getattr(state, name)).encode())
        files[f"{name}.json"] = file.entry()
    with _create(folder / MANIFEST) as file:
        file.write(json.dumps({"version": 1, "files": files}, indent=2).encode())
    _sync_folder(folder)


def commit(temporary: Path, final: Path) -> Path:
    """Give a written checkpoint its name, durably, and point `latest` at it."""
    if final.exists():  # damaged, or the run would have gone on from it
        _delete(final)
    temporary.rename(final)
    _sync_folder(final.parent)
    link = final.parent / f"{LATEST}.tmp-{os.getpid()}"
    link.symlink_to(final.name)
    link.replace(final.parent / LATEST)
    return final


def prune(run_folder: Path, keep_last: int) -> None:
    """Delete all but the newest whole checkpoints."""
    whole = [folder for folder in steps(run_folder) if (folder / MANIFEST).exists()]
    for folder in whole[:-keep_last]:
        _delete(folder)


class _HashingFile:
    """A file that can only be appended to, and knows the size and SHA-256 of what it holds."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        self._size += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()

    def entry(self) -> dict[str, Any]:
        return {"size": self._size, "sha256": self._digest.hexdigest()}


@contextmanager
def _create(path: Path) -> Iterator[_HashingFile]:
    """Open a new file, and put it on the disk at the end.

    Raises:
        OSError: the disk is full, where torch.save says "unexpected pos 704 vs 598".
    """
    with path.open("xb") as raw:
        file = _HashingFile(raw)
        try:
            yield file
        except RuntimeError:
            if file.error is not None:
                raise file.error from None
            raise
        raw.flush()
        os.fsync(raw.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _delete(folder: Path) -> None:
    """Delete a checkpoint; half deleted, it no longer has a checkpoint's name."""
    doomed = folder.with_name(f"{folder.name}.tmp-old")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _remove_leftovers(run_folder: Path) -> None:
    for leftover in run_folder.glob("*.tmp-*"):
        if leftover.is_symlink():
            leftover.unlink()
        else:
            shutil.rmtree(leftover)


# --- loading (every rank together) --------------------------------------------------------------


def steps(run_folder: Path) -> list[Path]:
    """Return the committed checkpoints of a run, oldest first. They may still be damaged."""
    if not run_folder.is_dir():
        return []
    found = [path for path in run_folder.iterdir() if _STEP.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """Return the N of `step-N`."""
    match = _STEP.fullmatch(folder.name)
    assert match, folder
    return int(match[1])


def load(folder: Path) -> State | None:
    """Load one checkpoint, or the newest whole one of a run's folder, on every rank.

    Rank 0 alone reads and decides; the others receive its bytes, so the folder need not be shared.
    Tensors are on the CPU.

    Returns:
        None where the run has no checkpoint yet.

    Raises:
        CheckpointError: there are checkpoints and all are damaged.
    """
    is_reader = not dist.is_initialized() or dist.get_rank() == 0
    outcome: list[Any] = [None]  # the size of each file, none at all, or what is wrong
    content: dict[str, bytes] = {}
    if is_reader:
        try:
            content = _read_newest(folder)
            outcome = [{name: len(data) for name, data in content.items()}]
        except CheckpointError as error:
            outcome = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], CheckpointError):
        raise outcome[0]
    if not outcome[0]:
        return None
    return _decode({name: _share(content.get(name), size) for name, size in outcome[0].items()})


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
        manifest = json.loads((folder / MANIFEST).read_bytes())
        content = {name: (folder / name).read_bytes() for name in manifest["files"]}
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: unreadable ({error})") from None
    for name, entry in manifest["files"].items():
        if len(content[name]) != entry["size"]:
            raise CheckpointError(
                f"{folder}/{name}: {len(content[name])} bytes where {entry['size']} were written"
            )
        if hashlib.sha256(content[name]).hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{folder}/{name}: is not what was written (SHA-256)")
    return content


def _share(content: bytes | None, size: int) -> bytes:
    """Return rank 0's bytes on every rank."""
    if not dist.is_initialized():
        assert content is not None
        return content
    where = "cuda" if dist.get_backend() == "nccl" else "cpu"
    if content is None:
        tensor = torch.empty(size, dtype=torch.uint8, device=where)
    else:
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(where)
    dist.broadcast(tensor, 0)
    return _to_bytes(tensor.cpu())


def _decode(content: dict[str, bytes]) -> State:
    return State(
        model=_load_tensors(content["model.pt"]),
        optimizer=_load_tensors(content["optimizer.pt"]),
        progress=json.loads(content["progress.json"]),
        rng=json.loads(content["rng.json"]),
    )


def _load_tensors(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


# --- random generators --------------------------------------------------------------------------


def gather_rng_states() -> list[dict[str, Any]]:
    """Return every rank's rng_state on rank 0, and an empty list on the others."""
    if not dist.is_initialized():
        return [rng_state()]
    states: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(rng_state(), states or None)
    return states


def rng_state() -> dict[str, Any]:
    """Return the state of this process's random generators in terms of JSON."""
    state: dict[str, Any] = {
        "torch": _to_bytes(torch.get_rng_state()).hex(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = _to_bytes(torch.cuda.get_rng_state()).hex()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Take up an rng_state again. Make `iter(loader)` first: that draws a number too."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_from_hex(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(state["cuda"]))
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


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
    folder = Path(arguments[1])
    try:
        found = load(folder)
        if found is None:
            raise CheckpointError(f"{folder}: holds no checkpoint")
    except CheckpointError as error:
        print(f"checkpoint: {error}", file=sys.stderr)
        return 2
    print(weights_hash(found.model))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
