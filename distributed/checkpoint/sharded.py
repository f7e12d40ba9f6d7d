"""Sharded checkpoints: every rank writes its own part, through torch.distributed.checkpoint.

    step-400/    the files of any checkpoint, but the tensors in model.pt and optimizer.pt have
                 only names, types and shapes (torch's meta device); their content is in
      __0_0.distcp  __1_0.distcp ...    the parts, one from each rank
      index.pt                          where each tensor is in the parts
      .metadata                         the same, pickled, for torch's own tools; not read here

Any number of ranks, with any strategy, can read what they need from the parts. This module is slow
to import: do so only to read or write a sharded checkpoint.
"""

from __future__ import annotations

import copyreg
import enum
import json
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner, storage
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from ..collectives import gather_bytes, gloo_group, own_rank
from ..torch_internals import tree_map_only
from .files import (
    INDEX,
    CheckpointError,
    as_checkpoint_error,
    check_shared,
    entry_of,
    pack,
    sync,
    unpack,
)
from .snapshots import named_tensors

Trees = dict[str, Any]  # "model" and "optimizer": what their state_dict() returned

# The types in plans and the index. BytesStorageMetadata would make torch unpickle a part.
_KINDS = {
    kind
    for module in (filesystem, metadata, planner, storage)
    for kind in vars(module).values()
    if isinstance(kind, enum.EnumMeta) or (isinstance(kind, type) and is_dataclass(kind))
}
torch.serialization.add_safe_globals([*(_KINDS - {metadata.BytesStorageMetadata})])
for _kind in _KINDS:
    if isinstance(_kind, enum.EnumMeta):  # which Python 3.11.0 to 3.11.3 would load with getattr
        copyreg.pickle(_kind, lambda one: (type(one), (one.value,)))  # type: ignore[arg-type]


class Parts:
    """Writes this rank's part of each checkpoint. All ranks must call each method together."""

    def __init__(self) -> None:
        # Parts are written in the background. The threads of a rank may start their collectives in
        # a different order on each rank, so parts do not use training's process group.
        self._group = gloo_group() if dist.is_initialized() else None
        self._shapes: dict[str, Any] | None = None  # for which the plan was made
        self._packed = list[bytes]()  # where each rank put its tensors last time
        self._results = list[Any]()  # the same, unpacked

    def plan_and_choose(self, trees: Trees) -> tuple[Trees, list[Tensor]]:
        """Return the trees without their tensors' content, and the tensors that this rank writes.

        A tensor that several ranks hold is written by only one of them. The ranks plan again who
        writes what if a name, a shape or a type has changed on any rank.
        """
        tensors = dict(named_tensors(trees))
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if any(gather_bytes(b"" if shapes == self._shapes else b"new", self._group)):
            self._plan(tensors)
            self._shapes = shapes

        bare = tree_map_only(
            Tensor, lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta"), trees
        )
        chosen = [tensors[item.index.fqn] for item in self._planner.plan.items]
        return bare, [one.to_local() if hasattr(one, "to_local") else one for one in chosen]

    def _plan(self, tensors: dict[str, Tensor]) -> None:
        """Plan who writes what. Each rank plans for all, because torch would send pickled plans."""
        self._planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(tensors, is_coordinator=own_rank() == 0)
        own = pack(self._planner.create_local_plan())
        plans = [unpack(plan) for plan in gather_bytes(own, self._group)]
        plans, self._metadata = self._planner.create_global_plan(plans)
        plans = FileSystemWriter("").prepare_global_plan(plans)  # names the parts; needs no folder
        self._planner.finish_plan(plans[own_rank()])
        self._planner.state_dict = {}  # otherwise it would keep these tensors alive

    def write(self, begin: Callable[[], Path], copies: Sequence[Tensor]) -> dict[str, Any]:
        """Write copies of the chosen tensors into the folder that `begin` returns on rank 0.

        Rank 0 also writes index.pt and .metadata. Once the parts are on the disk, returns the
        manifest's entries for all of them on rank 0, and {} on the other ranks. Raises
        CheckpointError on every rank if one fails to write its part.
        """
        folders = self._on_all_ranks(lambda: str(begin()).encode() if own_rank() == 0 else b"")
        writer = FileSystemWriter(folders[0].decode(), sync_files=False, per_thread_copy_ahead=0)
        written = self._on_all_ranks(partial(self._write, writer, copies))
        replies = [reply.split(b"\n", 1) for reply in written]
        if own_rank() != 0:
            return {}

        packed = [results for _, results in replies]
        if packed != self._packed:
            self._packed = packed
            self._results = [unpack(one) for one in packed]  # only if changed: 0.1 ms per tensor

        writer.finish(self._metadata, self._results)  # for torch's own tools
        places = {part.index: part.storage_data for results in self._results for part in results}
        index = pack(replace(self._metadata, storage_data=places, storage_meta=None))
        Path(writer.path, INDEX).write_bytes(index)
        return {name: entry for own, _ in replies for name, entry in json.loads(own).items()}

    def _write(self, writer: FileSystemWriter, copies: Sequence[Tensor]) -> bytes:
        """Write and flush this rank's part; returns its entries, a newline, and torch's results."""
        folder = Path(writer.path)
        check_shared(folder)
        plan = self._planner.plan
        self._planner.copies = {i.index: one for i, one in zip(plan.items, copies, strict=True)}
        results = writer.write_data(plan, self._planner).wait()
        entries = {}
        for part in folder.glob(f"__{own_rank()}_*"):
            entries[part.name] = entry_of(part)
            sync(part)
        return json.dumps(entries).encode() + b"\n" + pack(results)

    def _on_all_ranks(self, do: Callable[[], bytes]) -> list[bytes]:
        """Call `do` on every rank; return all results in order of rank.

        If it raises on a rank, raises CheckpointError on every rank, with the first one's message.
        """
        try:
            mine = b"+" + do()
        except Exception as error:
            mine = b"-" + json.dumps([str(error), getattr(error, "fault", "")]).encode()

        answers = gather_bytes(mine, self._group)
        for rank, one in enumerate(answers):
            if one.startswith(b"-"):
                cause, fault = json.loads(one[1:])
                failed = CheckpointError(f"rank {rank}: {cause}")
                failed.fault = fault
                raise failed
        return [one[1:] for one in answers]


class _Planner(DefaultSavePlanner):
    """Plans with the tensors themselves, but writes copies of them."""

    copies: dict[metadata.MetadataIndex, Tensor]

    def lookup_object(self, index: metadata.MetadataIndex) -> Tensor:
        """Return the copy of a tensor, or of this rank's part of it; torch calls this to write."""
        return self.copies[index]


def make_reader(folder: Path, index: bytes) -> Callable[[Trees], Trees]:
    """Return a function that reads meta tensors onto the CPU, and this rank's part of each DTensor.

    The returned function returns new trees, and raises CheckpointError if it cannot read the parts.
    make_reader() raises it if this node does not see the folder, or if the index cannot be read.
    """
    check_shared(folder)
    with as_checkpoint_error(f"{folder}/{INDEX}: unreadable"):
        found = unpack(index)
        parts = FileSystemReader(folder)
        parts.set_up_storage_reader(found, True)

    def allocate(tensor: Tensor) -> Tensor:
        """Return an empty tensor for the content of a meta tensor or a DTensor."""
        mesh = getattr(tensor, "device_mesh", None)
        return torch.empty_like(tensor, device=mesh.device_type if mesh else "cpu")

    def read(trees: Trees) -> Trees:
        """Return the trees with the content of their tensors."""
        trees = tree_map_only(Tensor, allocate, trees)
        plans = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with as_checkpoint_error(f"{folder}: its parts are unreadable"):
            plans.set_up_planner(dict(named_tensors(trees)), found, True)
            parts.read_data(plans.create_local_plan(), plans).wait()
        return trees

    return read
