"""A checkpoint on disk: written in full before it gets its name, verified when it is read.

Each run saves in its own folder, and only one live run at a time writes to it:

    step-200/            model.pt  optimizer.pt  ranks.pt  progress.json  manifest.json
    step-400/
    step-300.damaged/    found damaged when a run read it; never used
    step-900.later/      of a later step than one saved since then; never used
    step-600.tmp-.../    being written, or left over from a process that died; never used
    latest -> step-400
    best -> step-200     the lowest validation loss so far, or the best value of another metric

A checkpoint is written under a temporary name, flushed to the disk, and only then renamed, so a
folder named step-N is always complete. Its manifest holds the size and SHA-256 of each file, and
its own SHA-256, because torch.load does not notice a flipped bit.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections import UserList
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import with_fault
from ..lock import UNSUPPORTED, update_link, warn_once
from ..torch_internals import tree_map_only

MANIFEST = "manifest.json"
TENSORS = ("model", "optimizer", "ranks")  # each in its own file, written by torch.save
FILES = {*(f"{name}.pt" for name in TENSORS), "progress.json"}
INDEX = "index.pt"  # only in a sharded checkpoint, beside its parts: see sharded.py
_NAME = re.compile(r"step-\d+")
_PART = re.compile(r"__\d+_\d+\.distcp|\.metadata")
Content = Mapping[str, Any]
_CHUNK = 1 << 22  # bytes
_WHY = 1000  # characters of an error that are shown
_log = logging.getLogger(__name__)
torch.serialization.add_safe_globals([codecs.encode])  # for bytes; torch 2.5 and newer allow it


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or saved; the message is one line that names the cause."""

    fault = ""


@contextlib.contextmanager
def as_checkpoint_error(cause: str) -> Iterator[None]:
    """Turn any error in the body into a CheckpointError: a line that begins with the cause.

    Damaged content, and torch, can raise errors of any kind and of many lines.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:_WHY] or type(error).__name__
        raise CheckpointError(f"{cause} ({why})") from None


def check_shared(folder: Path) -> None:
    """Raise CheckpointError if this node does not see a folder that rank 0 has created."""
    if not os.path.isdir(folder):
        raise with_fault(
            CheckpointError,
            "dir-not-shared",
            f"{folder} does not exist on {socket.gethostname()}; "
            "a sharded checkpoint needs a folder on a disk that all nodes share",
        )


# --- writing ------------------------------------------------------------------------------------


def write_files(folder: Path, tensors: Content, progress: Content, parts: Content) -> None:
    """Write `<name>.pt` files, progress.json and the manifest into a folder, and flush them.

    `tensors` has the content of each `<name>.pt`, in which Python's numbers replace NumPy's.
    `parts` has the manifest's entries for files that the ranks have written and flushed there.
    """
    for name, content in tensors.items():
        content = plain(getattr(content, "data", content))  # Ranks: still packed
        torch.save(content, folder / f"{name}.pt")
    (folder / "progress.json").write_text(json.dumps(progress))

    files = sorted(file for file in folder.iterdir() if file.name not in parts)
    entries = {**{file.name: entry_of(file) for file in files}, **parts}
    manifest = {"version": 2, "saved": time.time(), "files": entries}
    manifest["sha256"] = _hash_manifest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2))

    for file in (*files, folder / MANIFEST, folder):
        sync(file)


def delete_leftovers(run_folder: Path) -> None:
    """Delete what killed processes left behind: the next checkpoint needs the space."""
    for leftover in run_folder.glob("step-*.tmp-*"):
        _remove(leftover)


def entry_of(file: Path) -> dict[str, Any]:
    """Return the manifest's entry for a file."""
    return {"size": file.stat().st_size, "sha256": hash_file(file)}


def hash_file(file: Path) -> str:
    """Return the SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def pack(content: object) -> bytes:
    """Return tensors and plain types in the format of torch.save; NumPy's numbers as Python's."""
    torch.save(plain(content), file := io.BytesIO())
    return file.getvalue()


def plain(content: Any) -> Any:
    """Return the content with Python's numbers in place of NumPy's, which unpack() rejects."""
    kinds = (sys.modules["numpy"].generic,) if "numpy" in sys.modules else ()
    return tree_map_only(kinds, lambda one: one.item(), content)


def unpack(data: bytes) -> Any:
    """Return the unpacked content, on the CPU; never runs code from a pickle."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class Ranks(UserList[Any]):
    """Each rank's own state, by rank. Unpacked only on access, because there may be many ranks."""

    def __getitem__(self, rank: Any) -> Any:
        one = self.data[rank]
        return unpack(one) if isinstance(one, bytes) else one


def _hash_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content without its field sha256."""
    content = {**manifest}
    content.pop("sha256", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def commit(temporary: Path, final: Path) -> None:
    """Rename a written checkpoint to its final name, durably, and point `latest` at it.

    One of this step that is there, damaged or because the script saves the step again, is renamed
    before, and deleted afterwards. A kill between the renames leaves no checkpoint of this step.
    """
    before = _retire(final)
    temporary.rename(final)
    sync(final.parent)
    update_link(final.parent / "latest", final.name)
    _remove(before)


def prune(run_folder: Path, step: int, keep_last: int) -> None:
    """Delete old checkpoints, and rename those of later steps, so that no load chooses them.

    Later ones exist if a script has loaded an earlier checkpoint, or none. They may be all that is
    left of an earlier run: of each step, the newest is kept. Keeps the last `keep_last` up to this
    step, and the one with the lowest finite score; points `best` at it, or deletes a `best` that
    leads nowhere. Keeps damaged ones too, with a warning, as for what cannot be deleted or renamed.
    """
    scores = {}
    for folder in steps(run_folder):
        try:
            if step_of(folder) > step:
                set_aside(folder, "later")
            else:
                scores[folder] = score(read_progress(folder))
        except (CheckpointError, OSError) as error:
            _log.warning("%s; this checkpoint is not deleted", error)

    kept = {*[*scores][-keep_last:]}
    best = min(scores, key=scores.__getitem__, default=None)
    if best and math.isfinite(scores[best]):
        update_link(run_folder / "best", best.name)
        kept.add(best)
    elif not (run_folder / "best").exists():
        _remove(run_folder / "best")  # it pointed at one that is now set aside

    for folder in scores.keys() - kept:
        try:
            _remove(_retire(folder))
        except OSError as error:
            _log.warning("%s is not deleted: %s", folder, error)


def set_aside(folder: Path, ending: str) -> None:
    """Rename a checkpoint to step-N.ending, which is ignored, and replace one with that name."""
    aside = folder.with_name(f"{folder.name}.{ending}")
    _remove(aside)
    folder.rename(aside)
    _log.warning("%s is now %s", folder, aside.name)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk; drop a file from the page cache.

    If the file system cannot flush, warns once.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        if path.is_file():  # not read again soon: the page cache is for the training data
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        warn_once(f"files cannot be flushed ({error.strerror}); a power failure may damage them")
    finally:
        os.close(fd)


def _retire(folder: Path) -> Path:
    """Rename a checkpoint, if it exists, before it is deleted: a half-deleted one must not be used.

    Returns its new path; if it is not deleted, the next save deletes it.
    """
    doomed = folder.with_name(f"{folder.name}.tmp-old")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(doomed)
    return doomed


def _remove(path: Path) -> None:
    """Delete a folder, or a file or a link with its name; ignore errors (NFS keeps open files)."""
    if path.is_dir():  # rmtree would wait for a pipe
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


# --- reading ------------------------------------------------------------------------------------


def steps(run_folder: Path) -> list[Path]:
    """Return the committed checkpoints of a run, oldest first. They may still be damaged."""
    found = run_folder.glob("step-*")
    return sorted((one for one in found if _NAME.fullmatch(one.name)), key=step_of)


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def candidates(folder: Path) -> list[Path]:
    """Return the folder if it is a checkpoint, otherwise the checkpoints in it, newest first."""
    return [folder] if (folder / MANIFEST).exists() else steps(folder)[::-1]


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of a checkpoint's files; b"" for a part, which the ranks read later.

    Raises CheckpointError if a file, or a part, is not what was written.
    """
    files = read_manifest(folder)["files"]
    with ThreadPoolExecutor() as pool:  # hashing a file takes longer than reading it
        return dict(zip(files, pool.map(partial(_read_file, folder, files), files), strict=True))


def _read_file(folder: Path, files: Content, name: str) -> bytes:
    """Return a file's content, b"" for a part. Raises CheckpointError if its hash is wrong."""
    is_part = _PART.fullmatch(name)
    file = folder / name
    with as_checkpoint_error(f"{folder}: unreadable"):
        content = b"" if is_part else file.read_bytes()
        found = hash_file(file) if is_part else hashlib.sha256(content).hexdigest()
    if found != files[name]["sha256"]:
        raise CheckpointError(f"{file} differs from what was written (SHA-256)")
    return content


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest. Raises CheckpointError if it is damaged, or if a file's size differs."""
    with as_checkpoint_error(f"{folder}: unreadable"):
        _size_of(folder / MANIFEST)  # raises for a pipe, which would never end
        manifest = json.loads((folder / MANIFEST).read_bytes())
        # Version 1 had no hash of itself. Other names could be paths outside the folder.
        is_intact = manifest["version"] == 1 or manifest["sha256"] == _hash_manifest(manifest)
        entries = manifest["files"]
        others = {name for name in entries.keys() - FILES - {INDEX} if not _PART.fullmatch(name)}
        if not is_intact or not entries.keys() >= FILES or others:
            raise CheckpointError(f"{folder}/{MANIFEST} differs from what was written")

        time.localtime(manifest["saved"])  # raises if it is not a time, which a list shows
        for name, entry in entries.items():
            if (size := _size_of(folder / name)) != entry["size"]:
                raise CheckpointError(f"{folder}/{name} has {size} bytes, not {entry['size']}")
    return manifest  # type: ignore[no-any-return]


def _size_of(file: Path) -> int:
    """Return the size in bytes. Raises CheckpointError if this is not a regular file."""
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} is not a regular file")
    return status.st_size


def parse_file(folder: Path, name: str, data: bytes) -> Any:
    """Return what a file of a checkpoint holds. Raises CheckpointError if it cannot be read."""
    with as_checkpoint_error(f"{folder}/{name}: unreadable"):
        if name != "progress.json":
            return unpack(data)
        progress = json.loads(data)
        score(progress)  # raises if it is not a number
        return progress


def read_progress(folder: Path) -> dict[str, Any]:
    """Return progress.json. Raises CheckpointError if it is damaged, or if the manifest is."""
    name = "progress.json"
    data = _read_file(folder, read_manifest(folder)["files"], name)
    return parse_file(folder, name, data)  # type: ignore[no-any-return]


def score(progress: Any) -> float:
    """Return the `score` of a progress or, without one, its validation loss; lower is better.

    Returns infinity if it was saved with neither. Raises an error if it is not a number.
    """
    found = progress.get("score", progress.get("validation_loss"))
    return math.inf if found is None else float(found)
