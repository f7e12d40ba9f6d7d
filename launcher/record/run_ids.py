"""Run ids, if several launches are given the same one."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path

from distributed.errors import Refused
from launcher import processes
from launcher.plan.typed import Choices
from launcher.record.run_json import job_start, read, refuse_live, this_start

MOST_CHARACTERS = 100  # distributed.environment.check_run_id allows 128


def next_run_id(log_dir: Path, job: str, asked: Choices) -> str:
    """Return the first of JOB, JOB.1, ... that no launch in this start of the job has taken.

    Except in a dry run, this process reserves it, so that a launch at the same time gets the next
    one.
    """

    def is_free(folder: Path) -> bool:
        record = read(folder)
        return record is None or not _is_same(record.job, this_start(asked.environ))

    return _first_free(log_dir, job, is_free, asked)


def free_run_id(log_dir: Path, name: str, asked: Choices) -> str:
    """Return the first of NAME, NAME.1, ... that no live run has; torch's guides all use "100".

    This process reserves it, as in next_run_id().
    """

    def is_free(folder: Path) -> bool:
        with contextlib.suppress(Refused):
            refuse_live(folder, asked.environ)
            return True
        return False

    return _first_free(log_dir, name, is_free, asked)


def plain_run_id(rdzv_id: str) -> str:
    """Return torchrun's id as a run id, which names folders; empty for torchrun's default."""
    return (
        ""
        if rdzv_id == "none"
        else re.sub(r"[^\w.-]|^[.-]", "_", rdzv_id, flags=re.ASCII)[:MOST_CHARACTERS]
    )


def _is_same(start: str, other: str) -> bool:
    """Whether two starts of a job are the same; one may lack the submit time.

    Two launches in the same session of a PBS job are in the same start, even if qstat is silent.
    """
    (told, session), (now, here) = (one.partition(" @")[::2] for one in (start, other))
    is_told = bool(told and now) and (told.startswith(now) or now.startswith(told))
    return is_told or bool(session and session == here)


def _first_free(log_dir: Path, name: str, is_free: Callable[[Path], bool], asked: Choices) -> str:
    for number in itertools.count():
        run_id = f"{name}.{number}" if number else name
        is_ours = asked.is_dry_run or _take(log_dir / run_id, job_start(asked.environ))
        if is_ours and is_free(log_dir / run_id):
            break
    return run_id


def _take(folder: Path, start: int) -> bool:
    """Reserve a run's name on this machine. Returns False if another launch has reserved it.

    The reservation lasts until this process exits or becomes the agent; then the run's record
    decides. The next start of a job ignores reservations by a start that was cut off.
    """
    return processes.claim(hashlib.sha256(f"{folder.absolute()} {start}".encode()).hexdigest())
