"""Checkpoints: each one whole on disk, verified when read, the same bytes on every rank.

    python -m distributed.checkpoint ls DIR             the checkpoints of a run
    python -m distributed.checkpoint verify DIR         read them, and compare with their manifests
    python -m distributed.checkpoint export DIR FILE    the weights alone, for torch.load
    python -m distributed.checkpoint hash DIR           one SHA-256 over the weights

DIR is a checkpoint, or the folder of a run, of which export and hash take the newest whole one. A
run saves in a folder of its own, which only one live run at a time writes to:

    step-200/            model.pt  optimizer.pt  ranks.pt  progress.json  manifest.json
    step-400/
    step-600.tmp-.../    being written, or left over by a process that died: never counts
    latest -> step-400
    best -> step-200     of those with a validation loss

A checkpoint is written beside the others, flushed to the disk, and only then renamed, so that a
folder with a name of its own is whole. Its manifest holds each file's size and SHA-256: a flipped
bit would load in silence. Needs torch alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import logging
import math
import os
import random
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from distributed.heartbeat import beat
from distributed.lock import RunLock, update_link

MANIFEST = "manifest.json"
_CHUNK = 1 << 22  # bytes
_COPY_THREADS = 4  # memory is faster than one core can copy
_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or saved; one line that names the damage."""


@dataclass(frozen=True)
class State:
    """All that a run needs to go on as if it had never stopped."""

    model: dict[str, Tensor]  # the user's own module's, not the wrapper's
    optimizer: dict[str, Any]  # as optimizer.state_dict() gives it
    progress: dict[str, Any]  # step, place in the data, and the like: anything JSON can hold
    ranks: list[dict[str, Any]]  # what each rank has of its own, such as its rng_state


# --- saving (rank 0 alone) ----------------------------------------------------------------------


class Saver:
    """Saves a run's checkpoints in the background, one at a time; not enabled, it does nothing.

    The newest `keep_last` stay, and the one with the best validation loss: the least
    `progress["validation_loss"]`. The process must call `wait` before its end.

    Raises:
        Refused: another live process saves in this folder.
        CheckpointError: the folder cannot be written to.
    """

    def __init__(self, run_folder: Path, *, keep_last: int, enabled: bool = True) -> None:
        self.folder = run_folder
        self.keep_last = keep_last
        self.enabled = enabled
        self._memory: list[Tensor] = []  # for the copies, used again
        self._thread = threading.Thread()
        self._error: Exception | None = None
        if enabled:
            try:
                run_folder.mkdir(parents=True, exist_ok=True)
                self._lock = RunLock(run_folder, f"run {run_folder.name}")
            except OSError as error:
                cause = f"cannot write under '{run_folder}' ({error.strerror})"
                raise CheckpointError(f"{cause}; change checkpoint.dir [dir-unwritable]") from None

    def save(self, step: int, state: State) -> None:
        """Copy the state, and write the copy in the background, once the one before is written.

        Raises:
            CheckpointError: the one before could not be written; those before it are untouched.
        """
        if not self.enabled:
            return
        self.wait()
        copy = self._copy(state)
        self._thread = threading.Thread(target=self._write, args=(step, copy), daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the CheckpointError of the save in the background, if it has met one."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait for the save in the background; raises its CheckpointError."""
        while self._thread.is_alive():
            self._thread.join(1.0)
            beat()
        self.check()

    def _copy(self, state: State) -> State:
        """Return the state with its model and optimizer copied into our memory."""
        trees = (state.model, state.optimizer)
        theirs = [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]
        if [(t.shape, t.dtype) for t in theirs] != [(t.shape, t.dtype) for t in self._memory]:
            self._memory = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in theirs]
        _copy_all(self._memory, theirs)
        ours = iter(self._memory)
        model, optimizer = tree_map_only(Tensor, lambda _: next(ours), trees)
        return replace(state, model=model, optimizer=optimizer)

    def _write(self, step: int, state: State) -> None:
        temporary = self.folder / f"step-{step}.tmp-{socket.gethostname()}-{os.getpid()}"
        try:
            with self._lock.committing():
                for leftover in self.folder.glob("step-*.tmp-*"):
                    shutil.rmtree(leftover)
            _write_files(temporary, state)
            with self._lock.committing():
                _commit(temporary, self.folder / f"step-{step}")
                beat(saved=step)
                _prune(self.folder, step, self.keep_last)
        except Exception as error:
            with contextlib.suppress(OSError):
                shutil.rmtree(temporary)  # makes room, too
            self._error = CheckpointError(f"step {step} was not saved: {error}")


def _copy_all(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Copy each tensor into its own place, by several threads where that is quicker."""
    if torch.cuda.is_available():
        for memory, tensor in zip(ours, theirs, strict=True):
            memory.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    else:
        with ThreadPoolExecutor(_COPY_THREADS) as pool:
            list(pool.map(Tensor.copy_, ours, theirs))  # raises what a thread has met


def _write_files(folder: Path, state: State) -> None:
    """Write a new folder, and return when the disk has it."""
    folder.mkdir()
    for name in ("model", "optimizer", "ranks"):
        torch.save(getattr(state, name), folder / f"{name}.pt")
    (folder / "progress.json").write_text(json.dumps(state.progress))
    files = sorted(folder.iterdir())
    entries = {file.name: {"size": file.stat().st_size, "sha256": _hash(file)} for file in files}
    manifest = {"version": 1, "saved": time.time(), "files": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2))
    for file in (*files, folder / MANIFEST, folder):
        _sync(file)


def _hash(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _commit(temporary: Path, final: Path) -> None:
    """Give a written checkpoint its name, durably, and point `latest` at it."""
    if final.exists():  # damaged, or the run would have gone on from it
        _delete(final)
    temporary.rename(final)
    _sync(final.parent)
    update_link(final.parent / "latest", final.name)


def _prune(run_folder: Path, step: int, keep_last: int) -> None:
    """Delete old checkpoints, and those of later steps: the run went on without them."""
    whole = [folder for folder in steps(run_folder) if _is_whole(folder)]
    kept = [folder for folder in whole if _step_of(folder) <= step][-keep_last:]
    best = min(whole, key=_validation_loss)
    if math.isfinite(_validation_loss(best)):
        update_link(run_folder / "best", best.name)
        kept.append(best)
    for folder in whole:
        if folder not in kept:
            _delete(folder)


def _sync(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        if path.is_file():  # its pages are free for the next one, and push no data out of memory
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
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
    return sorted(found, key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name[5:])


def load(folder: Path) -> State | None:
    """Load one checkpoint, or the newest whole one of a run's folder, on every rank.

    Rank 0 alone reads and decides; the others receive its bytes, so the folder need not be shared.
    Tensors are on the CPU. Returns None where the run has no checkpoint yet.

    Raises:
        CheckpointError: there are checkpoints and all are damaged.
    """
    content: dict[str, bytes] = {}
    damage: CheckpointError | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            content = _read_newest(folder)
        except CheckpointError as error:
            damage = error
    if dist.is_initialized():
        told: list[Any] = [damage, {name: len(data) for name, data in content.items()}]
        dist.broadcast_object_list(told)
        damage, sizes = told
        content = {name: _share(content.get(name), size) for name, size in sizes.items()}
    if damage is not None:
        raise damage
    return _decode(content) if content else None


def _candidates(folder: Path) -> list[Path]:
    """Return the checkpoint itself, or all of a run's, the newest first."""
    return [folder] if (folder / MANIFEST).exists() else steps(folder)[::-1]


def _read_newest(folder: Path) -> dict[str, bytes]:
    damage = []
    for candidate in _candidates(folder):
        try:
            return _read(candidate)
        except CheckpointError as error:
            damage.append(str(error))
            _log.warning("%s; the one before it is tried", error)
    if damage:
        cause = f"{damage[0]}, and no whole checkpoint is left in {folder}"
        raise CheckpointError(f"{cause}; move it away, or take another RUN_ID [checkpoint-damaged]")
    return {}


def _read(folder: Path) -> dict[str, bytes]:
    """Return the content of a checkpoint's files, each just as its manifest says."""
    content = {}
    for name, entry in _manifest(folder)["files"].items():
        content[name] = (folder / name).read_bytes()
        if hashlib.sha256(content[name]).hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{folder}/{name}: is not what was written (SHA-256)")
    return content


def _manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest; all but the bytes of the files is seen to agree with it."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        for name, entry in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != entry["size"]:
                raise CheckpointError(f"{folder}/{name}: has {size} bytes, once {entry['size']}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: unreadable ({error})") from None
    return manifest


def _is_whole(folder: Path) -> bool:
    try:
        _manifest(folder)
    except CheckpointError:
        return False
    return True


def _validation_loss(folder: Path) -> float:
    loss = json.loads((folder / "progress.json").read_bytes()).get("validation_loss")
    return math.inf if loss is None else loss


def _share(content: bytes | None, size: int) -> bytes:
    """Return rank 0's bytes on every rank."""
    where = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.frombuffer(bytearray(content or size), dtype=torch.uint8).to(where)
    dist.broadcast(tensor, 0)
    return content or _to_bytes(tensor.cpu())


def _decode(content: dict[str, bytes]) -> State:
    tensors = {
        name: torch.load(io.BytesIO(content[f"{name}.pt"]), map_location="cpu", weights_only=True)
        for name in ("model", "optimizer", "ranks")
    }
    return State(progress=json.loads(content["progress.json"]), **tensors)


# --- what each rank has of its own --------------------------------------------------------------


def gather_ranks(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what every rank gives on rank 0, and an empty list on the others."""
    if not dist.is_initialized():
        return [own]
    everyone: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(own, everyone or None)
    return everyone


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
    """Take up an rng_state again. Make `iter(loader)` first: that may draw a number too."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


# --- the command line ---------------------------------------------------------------------------


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


def _list(folder: Path, describe: Callable[[Path], str]) -> bool:
    """Print a line for each checkpoint; returns whether any is damaged."""
    has_damage = False
    for path in _candidates(folder)[::-1]:
        try:
            text = describe(path)
        except CheckpointError as error:
            text, has_damage = f"damaged: {error}", True
        print(f"{path.name:<14} {text}")
    return has_damage


def _describe(path: Path) -> str:
    manifest, loss = _manifest(path), _validation_loss(path)
    size = sum(entry["size"] for entry in manifest["files"].values()) / 1e6
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["saved"]))
    names = [n for n in ("latest", "best") if (path.parent / n).resolve() == path.resolve()]
    text = f"validation loss {loss:.4f}" if math.isfinite(loss) else ""
    return f"{size:10.1f} MB   {saved}   {text:<24} {' '.join(names)}".rstrip()


def _verify(path: Path) -> str:
    _read(path)
    return "whole"


def _weights(folder: Path) -> dict[str, Tensor]:
    return _decode(_read_newest(folder)).model


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns the exit code, 1 where verify finds damage."""
    try:
        if len(arguments) > 1 and not _candidates(Path(arguments[1])):
            raise CheckpointError(f"{arguments[1]} holds no checkpoint")
        match arguments:
            case ["ls", folder]:
                _list(Path(folder), _describe)
            case ["verify", folder]:
                return int(_list(Path(folder), _verify))
            case ["export", folder, file]:
                torch.save(_weights(Path(folder)), file)
            case ["hash", folder]:
                print(weights_hash(_weights(Path(folder))))
            case _:
                usage = "ls DIR | verify DIR | export DIR FILE | hash DIR"
                print(f"usage: python -m distributed.checkpoint {usage}", file=sys.stderr)
                return 2
    except (OSError, RuntimeError) as error:  # CheckpointError, and torch.save's
        print(f"checkpoint: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
