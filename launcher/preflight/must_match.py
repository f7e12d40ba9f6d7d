"""Versions and files that must be the same on every node, and how they differ.

Of torch, it reads the files, without importing it.
"""

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.wire.messages import NodeReport

ARGUMENTS = "the list of arguments"


def versions() -> dict[str, str]:
    """Return Python's version, and torch's without importing it ("" if it is missing)."""
    python = "{}.{}".format(*sys.version_info)
    return {"python": python, "torch": read_torch().get("__version__", "")}


def read_torch() -> dict[str, Any]:
    """Return the values in torch's version file, such as `cuda` and `hip` (a version or None).

    Runs that file, and nothing else of torch. Empty if torch is missing.
    """
    torch = importlib.util.find_spec("torch")
    if torch and torch.origin:
        with contextlib.suppress(OSError):  # a folder that merely has this name
            return runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    return {}


def find_missing_of_torch() -> str:
    """Return in words what an import of torch would not find, without importing it.

    Runs ldd, for up to 3 s. Returns "" if nothing is missing, or if ldd does not tell.
    """
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin or "").parent if spec else Path()
    names = [folder / f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    library = next(filter(Path.exists, names), None)
    if not library:
        return f"{str(folder)!r} has no _C module for this Python"
    try:
        command = ["env", "LC_ALL=C", "ldd", str(library)]
        traced = subprocess.run(command, capture_output=True, errors="replace", timeout=3)
    except (OSError, subprocess.TimeoutExpired):
        return ""  # ldd is not on every system

    lines = [line.split() for line in traced.stdout.splitlines()]
    missing = {words[0] for words in lines if words[1:] == ["=>", "not", "found"]}
    missing -= {file.name for file in folder.parent.glob("nvidia/*/lib/*")}  # torch loads these
    return f"there is no {', '.join(sorted(missing))}" if missing else ""


def describe_program(
    words: Sequence[str], task_file: str, *, skips_arguments: bool
) -> dict[str, str]:
    """Return what agents compare, by name: the script, its arguments, and the files they name.

    Files are relative to the working directory. With `skips_arguments`, only the script and the
    file of train.py's task are compared.
    """
    if skips_arguments:
        return hash_files([words[0], task_file], Path())
    return {ARGUMENTS: shlex.join(words[1:]), **hash_files([*words, task_file], Path())}


def hash_files(words: Sequence[str], directory: Path) -> dict[str, str]:
    """Return hashes, by name, of this project and of each word that is a file of up to 1 MiB."""
    root = Path(__file__).parents[2]
    folders = (root / name for name in ("launcher", "distributed", "training"))
    modules = sorted(module for folder in folders for module in folder.rglob("*.py"))
    hashes = {"this project": _hash(*modules)}
    for path in (os.path.join(directory, word) for word in words):
        if os.path.isfile(path) and os.path.getsize(path) <= 1 << 20:
            with contextlib.suppress(OSError):  # an unreadable file counts as missing
                hashes[os.path.basename(path)] = _hash(Path(path))
    return hashes


def _hash(*files: Path) -> str:
    """Return the start of the SHA-256 of the concatenated files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def mismatches(me: NodeReport, node: NodeReport) -> Iterator[tuple[str, str]]:
    """Yield the fault and the cause for each version and file that differs between the nodes.

    A value of "" means that a version or file is missing, which its node has already reported.
    """
    for fault, mine, theirs in (
        ("version-mismatch", me.versions, node.versions),
        ("code-mismatch", me.files, node.files),
    ):
        for name in {**mine, **theirs}:
            here = mine.get(name, "missing")
            there = theirs.get(name, "missing")
            is_known = here and there  # otherwise its node has reported it
            if is_known and here != there:
                first, second = (f"node rank {each.node_rank} ({each.host})" for each in (me, node))
                yield fault, f"{name} is {here!r} on {first} and {there!r} on {second}"
