"""Save checkpoints in the background: rank 0 saves everything, or each rank saves its part."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..collectives import count_ranks
from ..errors import with_fault
from ..heartbeat import beat
from ..lock import lock_run
from ..torch_internals import tree_map_only
from .files import (
    TENSORS,
    CheckpointError,
    check_shared,
    commit,
    delete_leftovers,
    pack,
    prune,
    unpack,
    write_files,
)
from .snapshots import Snapshots, copy_all, kinds_of, named_tensors, with_leaves

_log = logging.getLogger(__name__)
_savers = weakref.WeakSet["Saver"]()  # of this process


@dataclass(frozen=True)
class State:
    """Everything a run needs to continue as if it had never stopped."""

    model: dict[str, Tensor]  # state_dict() of the user's module, without the DDP wrapper
    optimizer: dict[str, Any]  # as optimizer.state_dict() returns it
    progress: dict[str, Any]  # step, position in the data and the like: anything JSON can hold
    ranks: Sequence[dict[str, Any]] = ()  # each rank's own state, such as its rng_state()
    # Takes {"model": ..., "optimizer": ...} or one of them, and returns it with the content of its
    # meta tensors, which load() left on the disk; for a DTensor, this rank's part.
    fetch: Callable[[dict[str, Any]], dict[str, Any]] = dict
    is_snapshot: bool = False  # it was in memory, and may not be on the disk

    def __post_init__(self) -> None:
        for name in ("model", "optimizer", "progress"):
            if not isinstance(getattr(self, name), dict):
                raise TypeError(f"State's {name} is not a dict")
        len(self.ranks)  # raises TypeError if it is no sequence

    def trees(self) -> dict[str, Any]:
        """Return the fields that hold tensors."""
        return {"model": self.model, "optimizer": self.optimizer}


class Saver:
    """Saves a run's checkpoints in the background, one at a time; enable it only on rank 0.

    With `format` "full", rank 0 writes everything, and the other ranks' savers do nothing. With
    "sharded", every rank calls `save`, with tensors that may be DTensors, and writes its own part.

    Keeps the newest `keep_last` checkpoints, and the one with the lowest `progress["score"]` or,
    without a score, `progress["validation_loss"]`. A process that exits waits for its save.

    If enabled, creating it creates the folder, and locks it until the process exits (see lock_run,
    which may wait). If sharded, all ranks must create it together. Raises Refused if another live
    process saves in the folder or the folder belongs to another job, CheckpointError if it is not
    writable, and ValueError for `keep_last` below 1 or an unknown format.
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
        self.format = format
        self.last_step: int | None = None  # passed to save()
        self._memory = list[Tensor]()  # for the copies; reused
        self._thread = threading.Thread()
        self._error: CheckpointError | None = None
        self.snapshots = Snapshots()
        self._parts: Any = None  # sharded.Parts, which is slow to import
        self._checked = -1  # tensors, of a kind that can be loaded again
        _savers.add(self)
        if format == "sharded":
            from .sharded import Parts

            self._parts = Parts()
        if enabled:
            try:
                run_folder.mkdir(parents=True, exist_ok=True)
                self._lock = lock_run(run_folder)
            except OSError as error:
                raise with_fault(
                    CheckpointError,
                    "dir-unwritable",
                    f"cannot write under '{run_folder}' ({error.strerror}); set checkpoint.dir",
                ) from None

    def check_folder(self) -> None:
        """Raise CheckpointError if this rank's node does not see the folder of sharded checkpoints.

        Call it once rank 0 has created its Saver; otherwise, the first save finds out.
        """
        if self._parts:
            check_shared(self.folder)

    def save(self, step: int, state: State) -> None:
        """Wait for the previous save, copy the state, and write the copy in the background.

        Raises CheckpointError if the previous save failed, or if the state holds what could not be
        loaded again; earlier checkpoints are intact.
        """
        self.last_step = step
        if not self.enabled and self._parts is None:  # rank 0 writes everything
            return

        trees = state.trees()
        tensors = self._loadable_tensors(state)
        self.wait()  # for the memory of the copies, too
        if self._parts is None:
            copies = self._copy(tensors)
            trees = with_leaves(trees, copies)
        else:
            trees, chosen = self._parts.plan_and_choose(trees)
            copies = self._copy(chosen)

        self._thread = threading.Thread(
            target=self._write, args=(step, replace(state, **trees), copies), daemon=True
        )
        self._thread.start()

    def snapshot(self, step: int, state: State) -> None:
        """Copy the state into the node agent's memory; a restart continues from the newest copy.

        If a run fails or is stopped, the agent writes that copy as a checkpoint; a run that exits
        with code 0 must `save` its last state itself. Without an agent, nothing is copied. Raises
        CheckpointError if the state could not be loaded again, and ValueError for a DTensor that is
        not sharded by rows.
        """
        if not self.enabled and self._parts is None:
            return

        self._loadable_tensors(state)
        holders = count_ranks() if self._parts else 1
        about = {
            "folder": str(self.folder.absolute()),
            "keep_last": self.keep_last,
            "progress": json.dumps(state.progress),
            "ranks": getattr(state.ranks, "data", state.ranks),  # still packed
        }
        self.snapshots.take_snapshot(step, holders, state.trees(), about)

    def _loadable_tensors(self, state: State) -> list[Tensor]:
        """Return a state's tensors; raises CheckpointError if it could not be loaded again."""
        trees = state.trees()
        tensors = dict(named_tensors(trees))
        # Checking takes time: do it the first time, and if the number of tensors has changed.
        if len(tensors) != self._checked:
            for name, tensor in tensors.items():
                if cause := why_not_loadable(tensor, must_be_dense=self._parts is not None):
                    raise CheckpointError(f"{name} {cause}")
            packed = getattr(state.ranks, "data", state.ranks)
            contents = tree_map_only(Tensor, lambda _: 0, trees)
            check_loadable({**contents, "ranks": packed[0]} if packed else contents)
        self._checked = len(tensors)
        return [*tensors.values()]

    def check(self) -> None:
        """Raise the CheckpointError of the background save if it has failed."""
        if self._error:
            raise self._error

    def wait(self) -> None:
        """Wait for the background save, and beat meanwhile. Raises CheckpointError if it failed."""
        while self._thread.is_alive():
            self._thread.join(1.0)
            beat()
        self.check()

    def _copy(self, theirs: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the tensors, in this saver's memory, which the next call overwrites."""
        if kinds_of(theirs) != kinds_of(self._memory):
            self._memory = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in theirs]
        copy_all(self._memory, theirs)
        return self._memory

    def _write(self, step: int, state: State, copies: Sequence[Tensor]) -> None:
        """Write and commit a checkpoint, and delete old ones; an error is kept for `check`."""
        temporary = self.folder / f"step-{step}.tmp-{socket.gethostname()}-{os.getpid()}"
        parts = dict[str, Any]()
        try:
            if self._parts is None:
                self._begin_folder(temporary)
            else:
                parts = self._parts.write(partial(self._begin_folder, temporary), copies)
            if not self.enabled:  # rank 0 writes and commits the rest
                return

            tensors = {name: getattr(state, name) for name in TENSORS}
            write_files(temporary, tensors, state.progress, parts)
            with self._lock.committing():
                commit(temporary, self.folder / f"step-{step}")
                beat(saved=step)
                prune(self.folder, step, self.keep_last)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)  # frees its space
            self._error = CheckpointError(f"step {step} was not saved: {error}")
            self._error.fault = getattr(error, "fault", "")

    def _begin_folder(self, temporary: Path) -> Path:
        """Delete what killed processes left behind; create and return the checkpoint's folder."""
        with self._lock.committing():  # raises if another process has taken over: it writes here
            delete_leftovers(self.folder)
        temporary.mkdir()
        return temporary


def wait_for_saves() -> None:
    """Wait for this process's saves. Warn of those that failed; the next save raises the error."""
    for saver in [*_savers]:
        try:
            saver.wait()
        except CheckpointError as error:
            _log.warning("%s", error)


# A script that raises while a save is in progress does not lose it. The node agent sees it waiting.
threading._register_atexit(wait_for_saves)  # type: ignore[attr-defined]


def why_not_loadable(tensor: Tensor, must_be_dense: bool) -> str:
    """Return why a tensor could be saved, but not loaded again; "" if it could."""
    kind = type(tensor).__name__
    is_dense = tensor.layout == torch.strided and not tensor.is_quantized
    if kind not in ("Tensor", "Parameter", "DTensor"):
        return f"is a {kind}, not a plain tensor; convert it, or use another optimizer"
    if tensor.is_meta:
        return "is on the meta device, without content; use to_empty() first"
    if tensor.is_nested or (must_be_dense and not is_dense):
        return "is nested, sparse or quantized; convert it with to_dense() or dequantize()"
    if is_dense and 0 in tensor.stride() and tensor.numel() > 1:
        return "was made by expand(), so torch cannot load it; add .contiguous()"
    return ""


def check_loadable(contents: Mapping[str, Any]) -> None:
    """Raise CheckpointError, with the name of what could be saved, but not loaded again.

    Contents that are bytes are packed already.
    """
    for name, one in contents.items():
        try:
            unpack(one if isinstance(one, bytes) else pack(one))
        except Exception as error:  # torch's, or that of an object's own pickling
            kind = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise CheckpointError(
                f"{name} holds {kind[1] if kind else 'an object'}, which is not loaded "
                "from a file, for safety; keep only tensors, numbers, text, lists and dicts in it"
            ) from None
