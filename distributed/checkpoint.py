"""Checkpoints: complete or absent on disk, verified when read, the same on every rank.

    python -m distributed.checkpoint ls DIR             list the checkpoints of a run
    python -m distributed.checkpoint verify DIR         read them and compare with their manifests
    python -m distributed.checkpoint export DIR FILE    write the weights alone, for torch.load,
                                                        or into FILE.safetensors for others
    python -m distributed.checkpoint hash DIR           print one SHA-256 over the weights

DIR is a checkpoint, or the folder of a run; export and hash then take its newest intact checkpoint.
checkpoint_files.py describes the folder, sharded.py what a sharded one has besides.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import checkpoint_files as files
from .checkpoint_files import CheckpointError as CheckpointError
from .collectives import broadcast_bytes, gather_bytes, gather_json, to_bytes
from .errors import with_fault
from .heartbeat import beat
from .lock import RunLock
from .snapshot import Snapshots, copy_all, newest_snapshot
from .torch_internals import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from .sharded import Parts


@dataclass(frozen=True)
class State:
    """Everything a run needs to continue as if it had never stopped."""

    model: dict[str, Tensor]  # state_dict() of the user's module, without the DDP wrapper
    optimizer: dict[str, Any]  # as optimizer.state_dict() returns it
    progress: dict[str, Any]  # step, position in the data and the like: anything JSON can hold
    ranks: Sequence[dict[str, Any]] = ()  # each rank's own state, such as its rng_state()
    # Returns {"model": ..., "optimizer": ...} or one of them with the content of its meta tensors,
    # which load() has left on the disk; of a DTensor, this rank's part.
    fetch: Callable[[dict[str, Any]], dict[str, Any]] = dict
    is_snapshot: bool = False  # it was in memory, and is perhaps not on the disk


# --- saving (rank 0 alone, or every rank its part) ----------------------------------------------


class Saver:
    """Saves a run's checkpoints in the background, one at a time; enable it on rank 0 alone.

    With `format` "full", rank 0 writes everything, and the other ranks' savers do nothing. With
    "sharded", every rank calls `save`, with tensors that may be DTensors, and writes its own part.

    Keeps the newest `keep_last`, and the one with the lowest `progress["score"]`, or, without that,
    `progress["validation_loss"]`. Call `wait` before the process exits. Raises Refused if another
    live process saves in this folder or the folder is another job's, CheckpointError if it cannot
    be written to, and ValueError for `keep_last` below 1 or an unknown format.
    """

    def __init__(
        self, run_folder: Path | str, *, keep_last: int, enabled: bool = True, format: str = "full"
    ) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; keep at least 1 checkpoint")
        if format not in ("full", "sharded"):
            raise ValueError(f"format {format!r} is unknown; use full or sharded")
        self.folder = run_folder = Path(run_folder)
        self.keep_last = keep_last
        self.enabled = enabled
        self._memory: list[Tensor] = []  # for the copies; reused
        self._thread = threading.Thread()
        self._error: CheckpointError | None = None
        self.snapshots = Snapshots()
        self._parts: Parts | None = None
        if format == "sharded":
            from .sharded import Parts

            self._parts = Parts()
        if enabled:
            try:
                run_folder.mkdir(parents=True, exist_ok=True)
                self._lock = RunLock(run_folder, f"run {run_folder.name}")
            except OSError as error:
                cause = f"cannot write under '{run_folder}' ({error.strerror})"
                cause += "; change checkpoint.dir"
                raise with_fault(CheckpointError, "dir-unwritable", cause) from None

    def save(self, step: int, state: State) -> None:
        """Wait for the previous save, copy the state, and write the copy in the background.

        Raises CheckpointError if the previous save failed; earlier checkpoints are intact.
        """
        if not self.enabled and self._parts is None:
            return
        self.wait()
        trees: dict[str, Any] = {"model": state.model, "optimizer": state.optimizer}
        if self._parts is None:
            copies = self._copy([leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)])
            ours = iter(copies)
            trees = tree_map_only(Tensor, lambda _: next(ours), trees)
        else:
            trees, chosen = self._parts.choose(trees)
            copies = self._copy(chosen)
        arguments = (step, replace(state, **trees), copies)
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()

    def snapshot(self, step: int, state: State) -> None:
        """Copy the state into the node agent's memory: a restart goes on from the newest.

        A run that fails or is stopped has it written as a checkpoint; one that ends with code 0
        must `save` its end itself. No agent, no snapshot.
        """
        if self.enabled or self._parts is not None:
            holders = dist.get_world_size() if self._parts and dist.is_initialized() else 1
            about = {"folder": str(self.folder.absolute()), "keep_last": self.keep_last}
            ranks = state.ranks.data if isinstance(state.ranks, files.Ranks) else state.ranks
            about |= {"progress": state.progress, "ranks": ranks}
            trees = {"model": state.model, "optimizer": state.optimizer}
            self.snapshots.take(step, holders, trees, about)

    def check(self) -> None:
        """Raise the CheckpointError of the background save if it has failed."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait for the background save. Raises its CheckpointError."""
        while self._thread.is_alive():
            self._thread.join(1.0)
            beat()
        self.check()

    def _copy(self, theirs: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors copied into memory of our own."""
        if [(t.shape, t.dtype) for t in theirs] != [(t.shape, t.dtype) for t in self._memory]:
            self._memory = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in theirs]
        copy_all(self._memory, theirs)
        return self._memory

    def _write(self, step: int, state: State, copies: Sequence[Tensor]) -> None:
        temporary = self.folder / f"step-{step}.tmp-{socket.gethostname()}-{os.getpid()}"
        parts: dict[str, Any] = {}
        try:
            if self._parts is None:
                self._begin(temporary)
            else:
                parts = self._parts.write(partial(self._begin, temporary), copies)
            if not self.enabled:
                return
            tensors = {name: getattr(state, name) for name in files.TENSORS}
            files.write(temporary, tensors, state.progress, parts)
            with self._lock.committing():
                files.commit(temporary, self.folder / f"step-{step}")
                beat(saved=step)
                files.prune(self.folder, step, self.keep_last)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)  # frees its space
            self._error = CheckpointError(f"step {step} was not saved: {error}")
            self._error.fault = getattr(error, "fault", "")

    def _begin(self, temporary: Path) -> Path:
        """Delete what killed processes left behind, and make the folder of the next checkpoint."""
        with self._lock.committing():
            files.delete_leftovers(self.folder)
        temporary.mkdir()
        return temporary


# --- loading (every rank together) --------------------------------------------------------------


def load(folder: Path | str, *, whole: bool = True) -> State | None:
    """Load one checkpoint, or a run's newest intact one, on every rank.

    Only rank 0 reads; the other ranks receive its bytes, so the folder need not be shared. But each
    rank reads the parts of a sharded one: now, or if not `whole` later with `State.fetch`. After a
    restart, a snapshot in memory counts, too. Tensors are on the CPU. Returns None if there is none
    yet; CheckpointError: all are damaged, or a sharded one is not on a disk that this node shares.
    Damaged ones are set aside if rank 0 has made its Saver before.
    """
    folder = Path(folder)
    taken = newest_snapshot(folder)
    content: dict[str, bytes] = {}
    damage, is_snapshot = "", False
    if not dist.is_initialized() or dist.get_rank() == 0:
        if taken is None or any(files.step_of(one) >= taken.step for one in files.steps(folder)):
            content, folder, damage = files.read_newest(folder)
        if taken is not None and not (content and files.step_of(folder) >= taken.step):
            content, damage, is_snapshot = taken.content(), "", True
    if dist.is_initialized():
        sizes = {name: len(data) for name, data in content.items()}
        found = [damage, str(folder), sizes, is_snapshot]
        damage, place, sizes, is_snapshot = gather_json(found)[0]
        folder = Path(place)
        content = {
            name: broadcast_bytes(content.get(name), size) for name, size in sizes.items() if size
        }
    if damage:
        cure = "move it away, or use another RUN_ID"
        raise with_fault(CheckpointError, "checkpoint-damaged", f"{damage}; {cure}")
    if not content:
        return None
    tensors = {name: files.unpack(content[f"{name}.pt"]) for name in files.TENSORS}
    tensors["ranks"] = files.Ranks(tensors["ranks"])
    state = State(progress=json.loads(content["progress.json"]), is_snapshot=is_snapshot, **tensors)
    if is_snapshot and taken is not None and taken.holders > 1:
        state = replace(state, fetch=taken.fetch)
    elif files.INDEX in content:
        from . import sharded

        state = replace(state, fetch=sharded.reader(folder, content[files.INDEX]))
    trees = {"model": state.model, "optimizer": state.optimizer}
    return replace(state, **state.fetch(trees)) if whole else state


# --- each rank's own state ----------------------------------------------------------------------


def gather_ranks(own: dict[str, Any]) -> files.Ranks:
    """Return every rank's dictionary on rank 0, in order of rank, and none on the other ranks."""
    gathered = gather_bytes(files.pack(own))
    return files.Ranks(gathered if not dist.is_initialized() or dist.get_rank() == 0 else [])


def rng_state() -> dict[str, Any]:
    """Return the state of this process's random generators, in types that torch.save accepts."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore an rng_state(). Call `iter(loader)` before it, because that may draw a number."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


# --- the command line ---------------------------------------------------------------------------


def weights_hash(weights: dict[str, Tensor]) -> str:
    """Return one SHA-256 over the names, dtypes, shapes and bytes of tensors, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(to_bytes(tensor))
    return digest.hexdigest()


def _list(folder: Path, *, verify: bool = False) -> bool:
    """Print a line for each checkpoint; returns whether any is damaged."""
    has_damage = False
    for path in files.candidates(folder)[::-1]:
        try:
            text = "intact" if verify and files.read(path) else _describe(path)
        except CheckpointError as error:
            text, has_damage = f"damaged: {error}", True
        print(f"{path.name:<14} {text}")
    return has_damage


def _describe(path: Path) -> str:
    manifest, loss = files.read_manifest(path), files.read_progress(path).get("validation_loss")
    size = sum(entry["size"] for entry in manifest["files"].values()) / 1e6
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["saved"]))
    names = [n for n in ("latest", "best") if (path.parent / n).resolve() == path.resolve()]
    text = f"validation loss {loss:.4f}" if loss is not None else ""
    return f"{size:10.1f} MB   {saved}   {text:<24} {' '.join(names)}".rstrip()


def _weights(folder: Path) -> dict[str, Tensor]:
    state = load(folder, whole=False)
    assert state is not None  # there is a checkpoint
    return dict(state.fetch({"model": state.model})["model"])


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code, 1 if verify finds damage."""
    try:
        if len(arguments) > 1 and not files.candidates(Path(arguments[1])):
            raise CheckpointError(f"{arguments[1]} holds no checkpoint")
        match arguments:
            case ["-h" | "--help"]:
                print(__doc__)
            case ["ls", folder]:
                _list(Path(folder))
            case ["verify", folder]:
                return int(_list(Path(folder), verify=True))
            case ["export", folder, file]:
                files.export(_weights(Path(folder)), file)
            case ["hash", folder]:
                print(weights_hash(_weights(Path(folder))))
            case _:
                usage = "ls DIR | verify DIR | export DIR FILE | hash DIR"
                print(f"usage: python -m distributed.checkpoint {usage}", file=sys.stderr)
                return 2
    except (OSError, RuntimeError) as error:  # CheckpointError, and torch.save's own
        print(f"checkpoint: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
