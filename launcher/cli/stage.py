"""STAGE_ENV: run Python from a copy of its environment on each node's own memory or disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from distributed.environment import DEFAULT_LOG_DIR
from launcher.cli.arguments import ROOT, Call
from launcher.plan.typed import Typed, UsageError

STAGE = ROOT / "scripts/lib/stage.sh"
_FANOUTS = ("auto", "local", "srun", "ssh", "pdsh")


def stage(
    typed: Typed, call: Call, words: Sequence[str], environ: Mapping[str, str] = os.environ
) -> Typed:
    """Have the nodes run a copy of the Python, and pack its environment if it is new.

    If a copy is here already, this process becomes one that runs from it. It unpacks none: this may
    be a login node, and no node of the run. Raises UsageError where STAGE_ENV cannot mean a folder.
    """
    place = environ.get("STAGE_ENV")
    if not place or typed.staged or typed.is_dry_run or typed.fanout not in _FANOUTS:
        return typed
    folder = Path("/dev/shm" if place == "1" else place)
    is_missing = typed.fanout == "local" and not folder.is_dir()  # another machine may have it
    if is_missing or not folder.is_absolute():
        cure = "give 1 for memory (/dev/shm), or a folder on each node's own disk"
        raise UsageError(f"STAGE_ENV is {place!r}; {cure}")
    if environ.get("CONTAINER"):
        cause = "STAGE_ENV is for environments of many files, and CONTAINER is one"
        raise UsageError(f"{cause}; leave one of them out")
    log_dir = typed.log_dir or environ.get("LOG_DIR") or DEFAULT_LOG_DIR
    command = ["bash", str(STAGE), "--pack", typed.python, log_dir]
    packed = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if packed.returncode != 0:  # it has said why
        raise SystemExit(packed.returncode)
    archive = packed.stdout.strip()
    name = Path(archive).name.removesuffix(".zst").removesuffix(".tar")
    copy = folder / f"launch-kit-{os.getuid()}" / name
    python = str(copy / "env/bin/python")
    if copy.is_dir():
        again = call._replace(python=python, staged=archive)
        start = [sys.argv[0], *again, *words]
        os.execvp("bash", ["bash", str(STAGE), archive, str(copy), *start])
    return replace(typed, staged=archive, python=python)
