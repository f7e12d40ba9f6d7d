"""Run ids, if several launches are given the same one."""

import contextlib
import hashlib
import itertools
import os
import re
from pathlib import Path

from distributed.errors import Refused
from launcher import processes
from launcher.record.run_json import job_start, read, refuse_live, this_start
from launcher.text import Environ

MOST_CHARACTERS = 100  # distributed.environment.check_run_id allows 128


def free_run_id(
    log_dir: Path, name: str, environ: Environ, *, of_job: bool, is_dry_run: bool
) -> str:
    """Return the first of NAME, NAME.1, ... that is free.

    With `of_job`, a name is taken if another launch has used it in this start of the job: a later
    start resumes that run. Otherwise, only live runs keep their names, because torch's guides all
    use "100". Except in a dry run, this process reserves the name on this machine, so that a launch
    at the same time gets the next one. May ask the scheduler. Raises OSError if a record cannot be
    read.
    """
    is_free = _is_new_in_job if of_job else _is_not_live
    for number in itertools.count():
        run_id = f"{name}.{number}" if number else name
        folder = log_dir / run_id
        if not is_free(folder, environ):  # before it is reserved, because that is not undone
            continue
        if is_dry_run:
            break
        # Another launch may have used it before it was reserved.
        if _reserve(folder, environ) and is_free(folder, environ):
            break
    return run_id


def plain_run_id(rdzv_id: str) -> str:
    """Return torchrun's id as a run id, which names folders; empty for torchrun's default."""
    if rdzv_id == "none":
        return ""
    return re.sub(r"[^\w.-]|^[.-]", "_", rdzv_id, flags=re.ASCII)[:MOST_CHARACTERS]


def _is_same(start: str, other: str) -> bool:
    """Return whether two results of this_start() mean the same one; one may lack the submit time.

    Two launches in the same session of a PBS job are in the same start, even if qstat is silent.
    Otherwise, False if a start is unknown.
    """
    job, _, session = start.partition(" @")
    other_job, _, other_session = other.partition(" @")
    if session and session == other_session:
        return True
    are_known = bool(job and other_job)
    return are_known and (job.startswith(other_job) or other_job.startswith(job))


def _is_new_in_job(folder: Path, environ: Environ) -> bool:
    """Return whether no launch in this start of the job has used this folder.

    Asks SLURM in its jobs. Raises OSError if a record cannot be read.
    """
    record = read(folder)
    return record is None or not _is_same(record.job, this_start(environ))


def _is_not_live(folder: Path, environ: Environ) -> bool:
    """Return whether the run of this folder is not live; asks and raises as refuse_live() does."""
    with contextlib.suppress(Refused):
        refuse_live(folder, environ)
        return True
    return False


def _reserve(folder: Path, environ: Environ) -> bool:
    """Reserve a run's name on this machine. Returns False if another launch has reserved it.

    The reservation lasts until this process exits or becomes the agent; then the run's record
    decides. The next start of a job ignores reservations by a start that was cut off. A folder's
    path is hashed because a socket's name has at most 107 bytes.
    """
    name = os.fsencode(f"{folder.absolute()} {job_start(environ)}")
    return processes.claim(hashlib.sha256(name).hexdigest())
