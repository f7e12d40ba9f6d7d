"""The folder of a run, `<log dir>/<run id>/`: node logs, error files and run.json (no torch)."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.lock import update_link


class RunFolder:
    """Paths of one run. The user's umask decides who can read them."""

    def __init__(self, root: Path, run_id: str, node_rank: int) -> None:
        self.root = root  # the log directory, which holds all runs
        self.path = root / run_id
        self.node_log = self.path / f"node_{node_rank}.log"
        self.failures = self.path / "failures"

    def create(self) -> None:
        """Make the folders and the links `latest` and `node_<rank>.log` beside them."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(exist_ok=True)
        self.failures.mkdir(exist_ok=True)
        self.node_log.touch()
        update_link(self.root / "latest", self.path.name)
        update_link(self.root / self.node_log.name, f"{self.path.name}/{self.node_log.name}")

    def write_record(self, fields: Mapping[str, Any]) -> None:
        """Merge `fields` into run.json, in one step."""
        path = self.path / "run.json"
        record: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):
            record = json.loads(path.read_text(encoding="utf-8"))
        new = path.with_suffix(".new")
        new.write_text(json.dumps({**record, **fields}, indent=2), encoding="utf-8")
        new.replace(path)


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
        "agent_arguments": argv,
        "working_directory": os.getcwd(),
        "hosts": hosts,
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
