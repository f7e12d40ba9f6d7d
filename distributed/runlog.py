"""The folder of a run, `<log dir>/<run id>/`: node logs, error files and run.json (no torch)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.failure import Refused


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run; private to the user, for logs show what the run was given."""

    root: Path  # the log directory, which holds all runs
    run_id: str
    node_rank: int

    @property
    def path(self) -> Path:
        return self.root / self.run_id

    @property
    def node_log(self) -> Path:
        return self.path / f"node_{self.node_rank}.log"

    @property
    def failures(self) -> Path:
        return self.path / "failures"

    def create(self) -> None:
        """Make the folders and the links `latest` and `node_<rank>.log` beside them."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.failures.mkdir(mode=0o700, exist_ok=True)
        self.node_log.touch(mode=0o600)
        point(self.root / "latest", self.run_id)
        point(self.root / self.node_log.name, f"{self.run_id}/{self.node_log.name}")

    def write_record(self, fields: Mapping[str, Any]) -> None:
        """Merge `fields` into run.json, in one step."""
        path = self.path / "run.json"
        record: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):
            record = json.loads(path.read_text(encoding="utf-8"))
        record.update(fields)
        handle, name = tempfile.mkstemp(dir=self.path, prefix="run.json.")
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)
        os.replace(name, path)


def claim(path: Path, what: str) -> int:
    """Lock a file for this process; the kernel frees it at the process's end.

    Raises:
        Refused: a live process has it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.pread(fd, 1000, 0).decode()
        cure = "wait for its end, or choose another RUN_ID"
        raise Refused("run-is-live", f"{what} is live: {holder}; {cure}") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return fd


def point(path: Path, target: str) -> None:
    """Point a symbolic link at `target` in one step; the newest of several runs wins."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    try:
        os.replace(new, path)
    except IsADirectoryError:  # something else has the name: a convenience less
        new.unlink()


def start_record(
    run_id: str,
    argv: Sequence[str],
    hosts: Sequence[str],
    world_size: int,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """What run.json holds from the start: enough to know, and to repeat, what ran."""
    return {
        "run_id": run_id,
        "command": os.environ.get("LAUNCH_COMMAND", ""),
        "agent_arguments": list(argv),
        "working_directory": os.getcwd(),
        "hosts": list(hosts),
        "world_size": world_size,
        "versions": {**versions, "kernel": platform.release()},
        "git_commit": _git_commit(),
        "started": time.time(),
        "ended": None,
        "exit_code": None,
    }


def _git_commit() -> str | None:
    """The commit of the working directory, with `+` when files were changed; None outside git."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None
