"""The folder of a run, `<log dir>/<run id>/`: node logs, error files and run.json (no torch)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.errors import Refused
from distributed.lock import RunLock, update_link
from launcher.processes import start_ticks

PROGRESS_S = 5.0  # between two updates of a run's step in run.json
_LOCK_S = 2.0  # the longest wait for another writer of run.json


class RunFolder:
    """Paths of one run. Their permissions follow the user's umask."""

    def __init__(self, root: Path, run_id: str, node_rank: int) -> None:
        self.root = root  # the log directory, which holds all runs
        self.path = root / run_id
        self.node_log = self.path / f"node_{node_rank}.log"
        self.failures = self.path / "failures"

    def create(self) -> None:
        """Make the folders, and the links `latest` and `node_<rank>.log` in the log directory.

        Raises:
            Refused: they cannot be written to.
        """
        try:
            self.failures.mkdir(parents=True, exist_ok=True)
            self.node_log.open("ab").close()
            update_link(self.root / "latest", self.path.name)
            update_link(self.root / self.node_log.name, f"{self.path.name}/{self.node_log.name}")
        except OSError as error:
            cause = f"cannot write to {str(self.path)!r} ({error.strerror})"
            raise Refused("dir-unwritable", f"{cause}; set LOG_DIR") from error

    def read_record(self) -> dict[str, Any]:
        """Return the content of run.json; nothing where there is none, or a damaged one."""
        with contextlib.suppress(OSError, ValueError):
            record = json.loads((self.path / "run.json").read_bytes())
            return record if isinstance(record, dict) else {}
        return {}

    def write_record(self, fields: Mapping[str, Any]) -> None:
        """Merge fields into run.json in one step; other fields stay, whoever wrote them."""
        self.path.mkdir(parents=True, exist_ok=True)
        new = self.path / f".run.json.{socket.gethostname()}.{os.getpid()}"
        with self._one_writer():
            new.write_text(json.dumps({**self.read_record(), **fields}, indent=2))
            new.replace(self.path / "run.json")

    @contextlib.contextmanager
    def _one_writer(self) -> Iterator[None]:
        """Keep other writers out; not for ever, and not where the file system has no locks."""
        fd = os.open(self.path / ".run.json.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            deadline = time.monotonic() + _LOCK_S
            while time.monotonic() < deadline:
                try:
                    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except (BlockingIOError, PermissionError):
                    time.sleep(0.01)
                except OSError:
                    break
            yield
        finally:
            os.close(fd)


class RunRecord:
    """run.json of a live run, kept up to date by node rank 0's agent.

    Once another start of the same job has taken the run over, it writes nothing more.
    """

    def __init__(self, folder: RunFolder, run_id: str, fields: Mapping[str, Any]) -> None:
        """Raises Refused where another live process has the run."""
        self._folder = folder
        self._lock = RunLock(folder.path, f"run {run_id}")
        self._progress = (-1, -1)
        self._written = time.monotonic()
        self._is_lost = False
        self._write({**fields, "state": "running", "step": -1, "saved_step": -1})

    def note_progress(self, saved_step: int, step: int) -> None:
        """Record the newest checkpoint and step, PROGRESS_S after the last time at the earliest."""
        is_due = time.monotonic() - self._written >= PROGRESS_S
        if is_due and (saved_step, step) != self._progress:
            self._progress = saved_step, step
            self._written = time.monotonic()
            self._write({"step": step, "saved_step": saved_step})

    def end(self, code: int, saved_step: int, step: int) -> None:
        """Record how the run ended."""
        self._write({**ended(code), "step": step, "saved_step": saved_step})

    def _write(self, fields: Mapping[str, Any]) -> None:
        try:
            with self._lock.committing():
                self._folder.write_record(fields)
        except Refused:  # taken over
            pass
        except OSError as error:  # a full disk ends the record, not the run
            if not self._is_lost:
                where = self._folder.path / "run.json"
                text = f"warning: cannot write {where} ({error.strerror}) [log-lost]"
                print(f"node agent: {text}", file=sys.stderr, flush=True)
            self._is_lost = True


def ended(code: int) -> dict[str, Any]:
    """Return the fields of run.json that say that the run has ended."""
    return {"state": "ended", "ended": time.time(), "exit_code": code}


def launcher_process(pid: int) -> dict[str, Any]:
    """Return what names the process that `--stop` signals: its id, its start and its host."""
    return {"process": pid, "birth": start_ticks(pid), "host": socket.gethostname()}


def start_record(
    run_id: str,
    argv: Sequence[str],
    hosts: Sequence[str],
    world_size: int,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Return what run.json holds from the start: enough to know, and to repeat, what ran."""
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
    """Return the working directory's commit, with `+` after changes; None outside git."""
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
