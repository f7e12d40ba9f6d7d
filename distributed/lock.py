"""A lock that lets only one live run write to a folder, and atomic changes to symbolic links."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from . import limits
from .errors import Refused
from .job import this_job

_LIVE = 0  # bytes of the lock file
_COMMIT = 1
# Locks of the open file: a process that copied the folder would lose ordinary locks (fcntl(2)).
_SET = 37  # F_OFD_SETLK and F_OFD_SETLKW, which are missing from fcntl in some Pythons
_SET_WAITING = 38
_FLOCK = struct.Struct("hhqqi0q")  # struct flock: type, whence, start, length, process
# Lustre mounted without flock, NFSv3 without lockd, kernels before 3.15, sandboxes.
UNSUPPORTED = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM
_MOST = 1 << 16  # bytes that are read of a lock file

Identity = Mapping[str, Any]  # of a process (see this_process)
_log = logging.getLogger(__name__)


class RunLock:
    """A lock on a folder, held until `close` or this process's exit: one live run writes there.

    A restarted job takes the folder over from its earlier start, which may still be running on a
    node that the scheduler cannot reach. So does a launch that has restarted its ranks. Each new
    lock file replaces the previous one. A kernel lock on its first byte shows whether the holder is
    alive; a lock on its second byte is held during a commit. The lock works on NFS, and forked
    processes do not inherit it. A file system without locks causes only a warning, and so does a
    damaged lock file, which is replaced.

    `me` is what this_process() returns. Creating a lock may wait up to COMMIT_S seconds for a
    commit. Raises Refused if a live process holds the lock, or if the folder belongs to another job
    with the same id, and OSError if the folder cannot be written to.
    """

    def __init__(self, folder: Path, me: Identity) -> None:
        self.what = f"run {folder.name}"  # in messages
        self.path = folder / "lock"
        new = folder / f".lock.{me['host']}.{me['process']}.{time.time_ns()}"
        self.fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.write(self.fd, json.dumps(me).encode())
            if not _set_lock(self.fd, fcntl.F_WRLCK, _LIVE):
                _log.warning(
                    f"warning: {folder}: this file system has no locks; "
                    "never start two runs with the same id"
                )
            while not self._replace_lock_file(new, me):
                pass  # another process was faster
        except BaseException:
            os.unlink(new)
            self.close()
            raise
        os.register_at_fork(after_in_child=self.close)  # a lock holds while any copy of fd is open

    def close(self) -> None:
        """Release the folder."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _replace_lock_file(self, new: Path, me: Identity) -> bool:
        """Put `new` in place of the folder's lock file; False if another process was faster.

        Deletes a link in its place. Waits up to COMMIT_S seconds for the holder's commit. Raises
        Refused if the holder is live, or commits for too long, or belongs to another job.
        """
        if self.path.is_symlink():  # not a lock of ours
            self.path.unlink(missing_ok=True)
        before = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            deadline = time.monotonic() + limits.COMMIT_S
            # With this lock, the holder cannot begin a commit until `new` is in place; then it
            # finds its own lock file deleted, and no longer commits.
            while not _try_lock(before, _COMMIT):
                if time.monotonic() > deadline:
                    raise _refusal(self.what, _holder(before))
                time.sleep(0.01)
            if os.fstat(before).st_nlink == 0:  # another process has replaced it meanwhile
                return False

            holder = _holder(before)
            if not holder and os.fstat(before).st_size:
                _log.warning(f"warning: {self.path} is damaged; it is replaced")
            self._refuse_foreign(holder, me)
            take_lock(before, self.what, me)
            os.replace(new, self.path)
            return True
        finally:
            os.close(before)

    def _refuse_foreign(self, holder: Identity, me: Identity) -> None:
        """Raise Refused if the folder is named after this job's id, but belongs to another job."""
        name = self.path.parent.name
        # Outside a job, there is no run_id, and no folder's name begins with a slash.
        is_named_after_job = f"{name}.".startswith(f"{me.get('run_id', '/')}.")
        if is_named_after_job and _is_foreign(holder, me):
            whose = f"cluster {holder.get('cluster')}, submitted {holder.get('submitted')}"
            cause = f"{self.what} belongs to another job with the same id ({whose})"
            is_log = self.path.with_name("run.json").exists()  # not a folder of checkpoints
            saved = f"checkpoints/{name} (or in checkpoint.dir)" if is_log else self.path.parent
            cure = f"choose another RUN_ID; to continue this run, add resume={saved}"
            raise Refused("foreign-run", f"{cause}; {cure}")

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Block takeovers while the body commits something; first wait for a takeover in progress.

        Raises Refused if another process has taken over: this one must no longer write. Raises
        FileNotFoundError if the folder is gone.
        """
        _set_lock(self.fd, fcntl.F_WRLCK, _COMMIT, _SET_WAITING)
        try:
            if os.fstat(self.fd).st_nlink == 0:
                self.path.stat()  # raises if the folder is gone
                _, host = locked_by(self.path.parent)
                raise Refused(
                    "node-lost",
                    f"{self.what} was restarted on {host}, so this process can no longer save",
                )
            yield
        finally:
            _set_lock(self.fd, fcntl.F_UNLCK, _COMMIT)


def lock_run(folder: Path, **known: int) -> RunLock:
    """Lock a run's folder for this process. May wait for squeue too (see this_process).

    `known` replaces what this_process() reads: an agent, which is not a rank, knows its `attempt`.
    """
    return RunLock(folder, this_process() | known)


def _set_lock(fd: int, kind: int, byte: int, how: int = _SET) -> bool:
    """Set or release (F_UNLCK) the lock on a byte; returns False if the file system has no locks.

    Unless `how` is _SET_WAITING, raises an OSError if another open file has the lock.
    """
    try:
        fcntl.fcntl(fd, how, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def _try_lock(fd: int, byte: int) -> bool:
    """Take a lock, if the file system has any; returns False if another process holds it."""
    try:
        _set_lock(fd, fcntl.F_WRLCK, byte)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: fcntl(2) allows both
        return False
    return True


def take_lock(fd: int, what: str, me: Identity) -> None:
    """Lock the first byte of an open lock file; raises Refused if its holder is live.

    `what` names the run in the message. If `me`, this process, is a restart of the holder, it
    neither takes the lock nor raises: the holder may live on, and loses the folder to `me`.
    """
    holder = _holder(fd)
    is_restart = False
    # The same job with a higher start count, or the same launch with a higher attempt.
    for origin, count in (("job", "start"), ("launch", "attempt")):
        if me.get(origin) and me[origin] == holder.get(origin):
            is_restart |= me[count] > holder[count]
    if not is_restart and not _try_lock(fd, _LIVE):
        raise _refusal(what, holder)


def _refusal(what: str, holder: Identity) -> Refused:
    """Return the error that says which live process holds the lock; {} if that is unknown."""
    job = f"job {holder['run_id']}, " if "run_id" in holder else ""
    who = f"{job}process {holder['process']} on {holder['host']}" if holder else "it holds the lock"
    return Refused(
        "run-is-live", f"{what} is live: {who}; wait until it ends, or choose another RUN_ID"
    )


def this_process() -> dict[str, Any]:
    """Return what identifies this process: id, host, job, launch and the number of its attempt.

    The job's keys are those of this_job(), which may wait for squeue. The launch is "" if our
    launcher did not start this process. Otherwise it is a hash of the launch's token, because
    others can read the lock file: a line that begins with the token is a message to the launcher.
    """
    token = os.environ.get("LAUNCH_TOKEN", "").partition(".")[0]  # a node's number follows
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        **this_job(os.environ),
        "launch": token and hashlib.sha256(token.encode()).hexdigest(),
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
    }


def _is_foreign(holder: Identity, me: Identity) -> bool:
    """Return whether a run named after this job's id belongs to another job (see this_job).

    `me` must be in a job. What is unknown on one side is not compared.
    """

    def differs(name: str) -> bool:
        """Return whether both sides know a field and have different values for it."""
        known = {str(holder.get(name, "")), me[name]} - {""}  # the file may hold anything
        return len(known) == 2

    if not holder:
        return False
    if differs("cluster"):
        return True

    start: int = me["start"]
    last_start: int = holder["start"]
    if holder.get("job") != me["job"]:
        return start == 0  # at its first start, a job has no folder yet
    # A job's start count only grows; its submit time is the same only within one start.
    return differs("submitted") if start == last_start else start < last_start


def _holder(fd: int) -> dict[str, Any]:
    """Return what a process has written into its lock file; {} if that is empty or damaged.

    The counts are 0 if the file lacks them.
    """
    with contextlib.suppress(Exception):  # of many kinds, depending on what the file holds
        facts = json.loads(os.pread(fd, _MOST, 0))
        numbers = {name: int(facts.get(name, 0)) for name in ("process", "attempt", "start")}
        return {**facts, "host": str(facts["host"]), **numbers}
    return {}


def open_lock(folder: Path) -> IO[str]:
    """Open the lock of a folder that others may write to: follow no link. Raises OSError."""
    return os.fdopen(os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW))


def is_locked(folder: Path) -> bool:
    """Return whether a live process, on any machine that shares the folder, holds its lock.

    That can be this process. False without a lock file, or if the file system has no locks.
    """
    with contextlib.suppress(OSError), open_lock(folder) as lock:
        return not _try_lock(lock.fileno(), _LIVE)
    return False


def locked_by(folder: Path) -> tuple[int, str]:
    """Return the id and host of the process that last locked a folder; id 0 if it is unknown."""
    with contextlib.suppress(OSError), open_lock(folder) as lock:
        if holder := _holder(lock.fileno()):
            return holder["process"], holder["host"]
    return 0, "another node"


def is_locked_here(folder: Path) -> bool:
    """Return whether this process holds a folder's lock."""
    return is_locked(folder) and locked_by(folder) == (os.getpid(), socket.gethostname())


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, unless this process has already logged the same text here."""
    _log.warning(f"warning: {text}")


def update_link(path: Path, target: str) -> None:
    """Point a symbolic link at `target` atomically; of several runs, the last one wins.

    A file system without links causes only a warning: they are for people who look at the folder.
    A file that is not a link, or a link to another folder, belongs to the user and is kept.
    """
    # Ours lead to a name in their own folder.
    is_ours = path.is_symlink() and path.readlink().parts[:1] not in ((), ("/",), ("..",))
    if os.path.lexists(path) and not is_ours:
        return

    new = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        os.replace(new, path)
    except OSError as error:
        why = f"{path.parent}: no symbolic links here ({error.strerror})"
        warn_once(f"{why}: names such as latest are not updated")
