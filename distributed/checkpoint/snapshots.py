"""Snapshots: a run's newest state in memory that outlives the ranks; see memory.py."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..collectives import gather_bytes, own_rank, to_bytes
from ..heartbeat import beat, find_record
from ..torch_internals import copy_each, tree_map_only
from .exchange import Neighbours, agree_on_step, deliver_copies
from .files import pack, unpack
from .memory import BEGIN, FILES, Header, Memory, choose_buffer

_COPY_THREADS = 4  # one core copies more slowly than memory allows
_MARK = "\0tensor "  # stands for a tensor in the trees: packing many tensors is slow
_ALIGN = 64


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a state, as it was read."""

    step: int
    holders: int
    folder: str  # the run's
    keep_last: int
    trees: dict[str, Any]  # "model" and "optimizer", with tensors on the meta device
    contents: dict[str, Tensor]  # by name (optimizer.state.0.step); of a DTensor, this rank's part
    shared: set[str]  # names of the tensors of which each rank holds a part
    progress: dict[str, Any]
    ranks: list[Any]  # each rank's own state, as gathered

    def as_files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint; they hold the tensors if rank 0 has all of them."""
        trees = self.fetch(self.trees) if self.holders == 1 else self.trees
        files = {f"{name}.pt": pack(tree) for name, tree in trees.items()}
        files["ranks.pt"] = pack(self.ranks)
        files["progress.json"] = json.dumps(self.progress).encode()
        return files

    def fetch(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Fill trees of meta tensors and DTensors with their content. All holders call this."""
        found = [self._read_tensor(name, one) for name, one in named_tensors(trees)]
        return with_leaves(trees, found)  # type: ignore[no-any-return]

    def _read_tensor(self, name: str, wanted: Tensor) -> Tensor:
        """Return a tensor's content, like `wanted`: of a DTensor, this rank's part of it.

        If the tensor was sharded but `wanted` is not, all ranks gather the parts.
        """
        mine = self.contents[name]
        mesh = getattr(wanted, "device_mesh", None)
        if mesh is not None:
            filled = torch.empty_like(wanted, device=mesh.device_type)
            filled.to_local().copy_(mine)  # type: ignore[attr-defined]
            return filled
        if name not in self.shared:
            return mine
        parts = gather_bytes(to_bytes(mine.contiguous()))
        return join([torch.frombuffer(bytearray(p), dtype=mine.dtype) for p in parts if p], wanted)


def join(rows: Sequence[Tensor], whole: Tensor) -> Tensor:
    """Join the rows of each rank, in order of rank, into a tensor of the shape of `whole`.

    Replicas follow in the next groups of ranks, and are dropped.
    """
    return torch.cat([one.flatten() for one in rows])[: whole.numel()].view(whole.shape)


class Buffer(Memory):
    """A buffer that a rank writes its tensors to, or reads them from."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._memory: mmap.mmap | None = None  # up to the end of the tensors
        self._views = list[Tensor]()  # one for each tensor's place in it

    def write(
        self, step: int, holders: int, tensors: Sequence[Tensor], rest: bytes, rank: int
    ) -> None:
        """Fill the buffer, which counts as empty until it is full. `seal` adds the checksum.

        `holders` ranks hold a part each, this one that of `rank`; `rest` is the packed state
        without the content of the tensors. The memory is kept mapped, and reused by the next call
        if the tensors have the same shapes and types.
        """
        self.set_header(Header())
        end = _offsets(tensors)[-1]
        if kinds_of(tensors) != kinds_of(self._views):
            os.ftruncate(self.fd, end)
            self._memory = mmap.mmap(self.fd, end)
            self._views = _views(self._memory, tensors)

        copy_all(self._views, tensors)
        size = end + len(rest)
        os.ftruncate(self.fd, size)
        os.pwrite(self.fd, rest, end)
        self.set_header(Header(step=step, holders=holders, rank=rank, rest=end, size=size))

    def seal(self) -> None:
        """Add the checksum."""
        header = self.header()
        self.set_header(header._replace(checksum=self._checksum(header)))

    def _checksum(self, header: Header) -> int:
        """Return the CRC-32 of all that follows the header."""
        # Reuse the mapping of write(), if any: a new one would delay the next step.
        memory = self._memory or mmap.mmap(self.fd, header.rest, prot=mmap.PROT_READ)
        checksum = zlib.crc32(memoryview(memory)[BEGIN : header.rest])
        return zlib.crc32(os.pread(self.fd, header.size - header.rest, header.rest), checksum)

    def about(self) -> dict[str, Any] | None:
        """Return everything but the tensors; None if the buffer is empty or damaged."""
        header = self.header()
        # -1: the rank ended before it added the checksum.
        if header.step < 0 or header.checksum not in (-1, self._checksum(header)):
            return None
        rest = os.pread(self.fd, header.size - header.rest, header.rest)
        return unpack(rest)  # type: ignore[no-any-return]

    def read(self, rest: dict[str, Any]) -> Snapshot:
        """Return the snapshot, copied out of the buffer; `rest` is the result of `about()`."""
        header = self.header()
        memory = mmap.mmap(self.fd, header.rest, mmap.MAP_PRIVATE)
        places = [torch.empty(shape, dtype=t, device="meta") for shape, t in rest["places"]]
        wholes = [*map(Tensor.new_empty, places, rest["shapes"])]
        # Clones, because torch.save() would write all the memory that views share.
        contents = [one.clone() for one in _views(memory, places)]

        def put_back(leaf: str) -> str | Tensor:
            """Return the meta tensor that a mark stands for; any other text is itself."""
            return wholes[int(leaf[len(_MARK) :])] if leaf.startswith(_MARK) else leaf

        trees = tree_map_only(str, put_back, rest["trees"])
        names = [name for name, _ in named_tensors(trees)]
        return Snapshot(
            step=header.step,
            holders=header.holders,
            folder=rest["folder"],
            keep_last=rest["keep_last"],
            trees=trees,
            contents=dict(zip(names, contents, strict=True)),
            shared={*rest["shared"]},
            progress=json.loads(rest["progress"]),
            ranks=rest["ranks"],
        )


class Snapshots:
    """One rank's two buffers, and two for another rank's part; none without a node agent."""

    def __init__(self) -> None:
        opened = _open_buffers()
        self._buffers = opened[:2]
        self._copies = opened[2:]
        self._neighbours: Neighbours | None = None
        self._sealing = threading.Thread()

    def take_snapshot(
        self, step: int, holders: int, trees: dict[str, Any], about: dict[str, Any]
    ) -> None:
        """Copy a state into the older buffer, or into one of a later step, which the run repeats.

        Waits until the previous snapshot is complete, and starts a thread that completes this one;
        without a node agent, does nothing. `about` has Snapshot's other fields; its `progress` is
        JSON text. If several ranks hold parts, all must call this. Raises ValueError for a DTensor
        that is not sharded by rows.
        """
        if not self._buffers:
            return

        tensors = dict(named_tensors(trees))
        shared = [name for name, one in tensors.items() if hasattr(one, "to_local")]
        for name in shared:
            places = tensors[name].placements  # type: ignore[attr-defined]
            if any(place.is_shard() and not place.is_shard(0) for place in places):
                raise ValueError(f"{name} is not sharded by rows; do not take snapshots of it")
        marks = [f"{_MARK}{number}" for number in range(len(tensors))]
        parts = [one.to_local() if hasattr(one, "to_local") else one for one in tensors.values()]
        rest = {
            **about,
            "trees": with_leaves(trees, marks),
            "shapes": [tensor.shape for tensor in tensors.values()],
            "places": kinds_of(parts),
            "shared": shared,
        }

        self.finish()
        if self._neighbours is not None:  # no rank may overwrite what another still needs
            self._neighbours.meet()
        older = choose_buffer(self._buffers, step)
        older.write(step, holders, parts, pack(rest), own_rank())
        if holders > 1 and self._neighbours is None:
            self._neighbours = Neighbours()
        self._sealing = threading.Thread(target=self._complete, args=[older])
        self._sealing.start()

    def _complete(self, taken: Buffer) -> None:
        """In the background, add the checksum, and exchange copies with the neighbouring nodes."""
        if self._neighbours is None:  # no rank waits for this thread: training goes first
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        taken.seal()
        if self._neighbours is not None:
            self._neighbours.exchange(taken, self._copies)

    def finish(self) -> None:
        """Wait for the last snapshot's checksum and copy; report progress as pieces arrive."""
        while self._sealing.is_alive():
            moved = self._neighbours.moved if self._neighbours else 0
            self._sealing.join(1.0)
            if self._neighbours and self._neighbours.moved != moved:
                beat()


def recover_snapshot(folder: Path) -> Snapshot | None:
    """Return this rank's part of a run's newest complete snapshot, or None without one.

    A part that was lost with its node comes from the node that holds a copy. The buffers of later
    snapshots, which are incomplete, are emptied. If rank 0 holds everything, the other ranks get
    None. All ranks must call this.
    """
    if FILES not in os.environ:  # on no rank: there is no node agent
        return None

    opened = _open_buffers()
    own = _of_run(folder, opened[:2])
    copies = _of_run(folder, opened[2:])
    newest, lacking = agree_on_step(
        [buffer.header() for buffer, _ in own.values()],
        [buffer.header() for buffer, _ in copies.values()],
    )

    for step, (buffer, _) in (*own.items(), *copies.items()):
        if step > newest:  # other ranks lack it, so the run repeats this step
            buffer.set_header(Header())
    if lacking:
        copy = copies[newest][0] if newest in copies else None
        deliver_copies(lacking, copy, choose_buffer(opened[:2], newest))
        own = _of_run(folder, opened[:2])

    if newest not in own:
        return None
    buffer, rest = own[newest]
    return buffer.read(rest)


def _of_run(folder: Path, buffers: Sequence[Buffer]) -> dict[int, tuple[Buffer, dict[str, Any]]]:
    """Return the buffers with an intact snapshot of a run, each with its `about()`, by step."""
    found = ((one, one.about()) for one in buffers)
    return {
        one.header().step: (one, rest)
        for one, rest in found
        if rest and rest["folder"] == str(folder.absolute())
    }


def _open_buffers() -> list[Buffer]:
    """Return the buffers that the agent's variable names; none in a program that a rank runs."""
    places = map(find_record, os.environ.get(FILES, "").split(","))
    return [Buffer(place[0]) for place in places if place]


def copy_all(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Copy each tensor into its counterpart, with several threads on a CPU; wait for all GPUs."""
    devices = {tensor.device for tensor in theirs if tensor.is_cuda}
    if devices:
        for memory, tensor in zip(ours, theirs, strict=True):
            memory.copy_(tensor, non_blocking=True)
        for device in devices:  # each copy is in the stream of the GPU that it reads
            torch.cuda.current_stream(device).synchronize()
    else:

        def copy_share(first: int) -> None:
            copy_each(ours[first::_COPY_THREADS], theirs[first::_COPY_THREADS])

        with ThreadPoolExecutor(_COPY_THREADS) as pool:
            list(pool.map(copy_share, range(min(_COPY_THREADS, len(ours)))))  # raises their errors


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree with names such as optimizer.state.0.step."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from named_tensors(value, f"{name}.{key}" if name else str(key))


def with_leaves(trees: Any, leaves: Sequence[Any]) -> Any:
    """Return trees with these leaves in place of their tensors, in the order of named_tensors."""
    rest = iter(leaves)
    return tree_map_only(Tensor, lambda _: next(rest), trees)


def kinds_of(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return shapes and types; tensors with equal ones fit into each other's memory."""
    return [(one.shape, one.dtype) for one in tensors]


def _offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Return where each tensor's content begins, and the end of the last."""
    offsets = [BEGIN]
    for tensor in tensors:
        end = offsets[-1] + tensor.nbytes
        offsets.append(end + -end % _ALIGN)
    return offsets


def _views(memory: mmap.mmap, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors like these, with their content in a buffer that they keep mapped."""
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return [
        whole[start : start + one.nbytes].view(one.dtype).view(one.shape)
        for start, one in zip(_offsets(tensors), tensors, strict=False)
    ]
