"""The record of a run, `<log dir>/<run id>/run.json`: what ran, and how it ended."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distributed.errors import REFUSED, Refused
from distributed.job import job_id, this_job
from distributed.lock import (
    is_locked,
    lock_run,
    locked_by,
    open_lock,
    take_lock,
    this_process,
)
from launcher.own_time import turns
from launcher.processes import start_ticks
from launcher.record.commit import git_commit
from launcher.record.restart import Restart
from launcher.text import Environ, open_own, unwritable_fault, warn
from launcher.typed_json import decode, parse_json
from launcher.wire import limits

ASKED, SHOWN = "stacks", "stacks.txt"  # the request for all stacks, and the answers
LONGEST_FILE = 1 << 24  # bytes that are read of a file in this folder
KEPT = "failure.txt"  # the last output of a run that failed or was stopped


@dataclass(frozen=True)
class LauncherProcess:
    """The process that --stop signals."""

    process: int
    birth: int  # when it started, in clock ticks since boot: process ids are reused
    host: str

    @classmethod
    def of(cls, pid: int) -> "LauncherProcess":
        """Return what identifies a living process on this machine."""
        return cls(pid, start_ticks(pid) or 0, socket.gethostname())

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process on this machine."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether the process is still running on this machine."""
        return self.process > 1 and start_ticks(self.process) == self.birth


@dataclass(frozen=True)
class Record:
    """The content of run.json. Times are in seconds since the epoch."""

    run_id: str = ""
    state: str = "unknown"  # starting, running, ended
    launcher: LauncherProcess | None = None
    detached: bool = False
    grace: float = limits.GRACE_S  # seconds that the ranks may take to save
    job: str = ""  # the start of the SLURM or PBS job in which it was launched
    command: str = ""  # as typed
    agent_arguments: tuple[str, ...] = ()
    working_directory: str = ""
    hosts: tuple[str, ...] = ()
    world_size: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    fault: str = ""  # of the failure that ended the run, as the failure block names it
    cause: str = ""
    step: int = -1  # the latest; -1 if unknown
    saved_step: int = -1
    first_step: float | None = None  # when the latest start completed its first step
    restarts: tuple[Restart, ...] = ()  # of all starts

    @property
    def is_over(self) -> bool:
        """Whether the run's end is recorded."""
        return self.exit_code is not None


def read(folder: Path) -> Record | None:
    """Return a run's record: empty if it is damaged, None if there is none. Raises OSError.

    Fields that this version does not know are ignored.
    """
    path = folder / "run.json"
    if path.is_symlink() or not path.exists():  # a link is not ours; the next record replaces it
        return None
    with open_own(path, "rb") as file:
        text = file.read(LONGEST_FILE)

    try:
        content = parse_json(text)
        known = {name: content[name] for name in vars(Record()) if name in content}
        return decode(Record, known)
    except (ValueError, TypeError):
        return Record()


def update(folder: Path, **changes: Any) -> None:
    """Change fields of run.json atomically; keep the others. Makes the folder. Raises OSError."""
    with _one_writer(folder):
        _change(folder, **changes)


def _change(folder: Path, **changes: Any) -> None:
    """Change fields of run.json; the caller locks out other writers. Raises OSError."""
    new = folder / f".run.json.{socket.gethostname()}.{os.getpid()}"
    record = replace(read(folder) or Record(), **changes)
    with open_own(new, "w") as file:
        file.write(json.dumps(asdict(record), indent=2))
    new.replace(folder / "run.json")


@contextlib.contextmanager
def _one_writer(folder: Path) -> Iterator[None]:
    """Lock out other writers. After 2 s, or if locking fails, continue without the lock.

    Creates the folder. Raises OSError if that fails, or if the lock file cannot be opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open_own(folder / ".run.json.lock", "a") as lock:
        for _ in turns(limits.RECORD_LOCK_S):
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):  # another writer has it
                continue
            except OSError:  # a file system without locks
                break
        yield


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Make a folder for logs, for the body to write to. Raises Refused if either fails (OSError).

    If a part of the path is a link to a folder that was removed, that folder is made again.
    """
    try:
        Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        cause = f"cannot write to '{folder}' ({error.strerror})"
        raise Refused(unwritable_fault(error), f"{cause}; set LOG_DIR") from None


# --- a launcher's part --------------------------------------------------------------------------


def this_start(environ: Environ) -> str:
    """Return an identifier of this start of the job; empty outside a job. Asks SLURM in its jobs.

    In a PBS job, where qstat may not answer, the identifier includes the session of this start.
    """
    job = this_job(environ)  # empty outside a job, and if PBS did not answer
    start = " ".join(str(job[name]) for name in ("cluster", "run_id", "start", "submitted") if job)
    if "PBS_JOBID" not in environ:
        return start

    if not job and environ.get("PBS_ENVIRONMENT") == "PBS_INTERACTIVE":
        start = job_id(environ)  # PBS never starts such a job again
    leader = os.getsid(0)
    return f"{start} @{socket.gethostname()} {leader} {start_ticks(leader)}"


def job_start(environ: Environ) -> int:
    """Return how many times the scheduler has restarted this job, without asking it."""
    job = json.loads(environ.get("LAUNCH_JOB") or "{}")  # as this_job() returns it
    return int(job.get("start") or environ.get("SLURM_RESTART_COUNT") or 0)


def refuse_live(folder: Path, environ: Environ) -> None:
    """Raise Refused if the run in a folder is live, as far as this machine can see.

    A scheduler may restart a job while its first start is still running; the new start then takes
    over the run. In a job, only the lock is checked, because it records the job. This asks SLURM in
    its jobs. Also raises Refused if the folder is a link, and OSError if run.json is not readable.
    """
    if folder.is_symlink():
        raise Refused("dir-unwritable", f"{folder} is a link; choose another RUN_ID")
    if job_id(environ):
        with contextlib.suppress(OSError), open_lock(folder) as lock:
            take_lock(lock.fileno(), f"run {folder.name}", this_process())
        return

    record = read(folder)
    launcher = record.launcher if record and not record.is_over else None
    if launcher is None:
        return
    is_live = launcher.is_alive if launcher.is_here else is_locked(folder)
    if is_live:
        where = "" if launcher.is_here else f" on {launcher.host}"
        cause = f"run {folder.name} is live: process {launcher.process}{where}"
        raise Refused("run-is-live", f"{cause}; wait until it ends, or choose another RUN_ID")


def note_start(folder: Path, environ: Environ, **fields: Any) -> None:
    """Record that this process starts the run. `fields` are more fields of the record.

    Deletes the last output of an earlier start. In a job of SLURM, asks squeue when it was
    submitted. Raises Refused if the run is live, or if its folder cannot be written to.
    """
    me = LauncherProcess.of(os.getpid())
    job = this_start(environ)
    with writing_to(folder), _one_writer(folder):
        refuse_live(folder, environ)
        (folder / KEPT).unlink(missing_ok=True)
        _change(folder, launcher=me, job=job, **fields, **_start_fields("starting"))


def note_end(folder: Path, code: int, *, agent: int | None = None) -> None:
    """Record how the run of this process ended, unless it is known or another process took over.

    `agent` is the id of an agent whose end its parent records: the run is that agent's if it was
    the last to lock the folder. Without `agent`, the record must name this process as the launcher.
    If the record cannot be read or written, nothing happens.
    """
    with contextlib.suppress(OSError):
        record = read(folder) or Record()
        if agent is None:
            is_ours = record.launcher == LauncherProcess.of(os.getpid())
        else:
            is_ours = locked_by(folder) == (agent, socket.gethostname())
        is_refused = code == REFUSED and is_locked(folder)  # another process has the run
        if is_ours and not record.is_over and not is_refused:
            update(folder, **end_fields(code))


def _start_fields(state: str) -> dict[str, Any]:
    """Return the fields of a run that starts now, without an end."""
    return {
        "state": state,
        "started": time.time(),
        "ended": None,
        "exit_code": None,
        "fault": "",
        "cause": "",
    }


def end_fields(code: int) -> dict[str, Any]:
    """Return the fields of a run that ends now."""
    return {"state": "ended", "ended": time.time(), "exit_code": code}


# --- the agent's part ---------------------------------------------------------------------------


class LiveRecord:
    """run.json of a live run, kept up to date by node rank 0's agent.

    Once another start of the same job has taken over the run, this agent writes nothing more.
    """

    def __init__(
        self,
        folder: Path,
        *,
        attempt: int,  # above 0: this agent takes over from a lost one
        **fields: Any,
    ) -> None:
        """Lock the run, and write what identifies it and is needed to repeat it.

        The lock is held until this process ends. Deletes the last output of an earlier start. If
        `attempt` is above 0, only locks the run: the agent writes what its restart has changed.
        `launcher` is missing if it has recorded itself; `fields` are other fields of the record.
        Raises Refused if another live process has the run, or if its folder cannot be written to.
        """
        self._folder = folder
        with writing_to(folder):
            self._lock = lock_run(folder, attempt=attempt)
        self.earlier = read(folder) or Record()
        self._job = self.earlier.job
        self._progress = (-1, -1)
        self._written = time.monotonic()
        self._is_lost = False

        if attempt:
            return
        (folder / KEPT).unlink(missing_ok=True)
        self.write_fields(
            run_id=folder.name,
            working_directory=os.getcwd(),
            git_commit=git_commit(),
            step=-1,
            saved_step=-1,
            first_step=None,
            **_start_fields("running"),
            **fields,
        )

    def notice_takeover(self) -> bool:
        """Return whether another start of this job has taken over the run since the last call.

        Reads run.json, where the other start has recorded itself (see end_earlier_start).
        """
        before = self._job
        with contextlib.suppress(OSError):
            record = read(self._folder) or self.earlier
            self._job = record.job or before
        return self._job != before

    def note_progress(self, saved_step: int, step: int) -> None:
        """Record the newest checkpoint and step if they changed, at most every STEP_RECORD_S."""
        is_due = time.monotonic() - self._written >= limits.STEP_RECORD_S
        if is_due and (saved_step, step) != self._progress:
            self._progress = saved_step, step
            self._written = time.monotonic()
            self.write_fields(step=step, saved_step=saved_step)

    def write_fields(self, **changes: Any) -> None:
        """Record these fields of the run, unless another start has taken it over.

        If they cannot be written, the run continues; the first time, a warning is printed.
        """
        try:
            with self._lock.committing():
                update(self._folder, **changes)
        except Refused:  # taken over
            pass
        except OSError as error:  # a full disk ends the record, not the run
            if not self._is_lost:
                warn(
                    f"node agent: warning: cannot write {self._folder / 'run.json'} "
                    f"({error.strerror}) [log-lost]"
                )
            self._is_lost = True
