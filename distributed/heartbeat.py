"""A rank reports its progress to its node agent through a record in shared memory (no torch).

A beat is one write to memory. It takes a microsecond and never waits. The agent reads the records,
and considers the run stuck when the ranks that are furthest behind have been silent for too long,
because the other ranks wait for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import mmap
import os
import signal
import struct
import time
from pathlib import Path
from typing import NamedTuple

from . import limits

STACK_SIGNAL = signal.SIGRTMIN + 9  # makes a rank write its stacks; scripts do not use it
LIMIT_OF_LONGEST = 10  # times the longest silence seen so far
RECORD = struct.Struct("<qqqddB?6x")
_SIGNAL_STACK_SIZE = 1 << 20  # bytes, for all signals at once; a page is used only when needed


class Beat(NamedTuple):
    """A rank's record. Time 0 means that nothing counts the rank's steps, so it is not watched."""

    step: int = -1  # optimizer steps done; -1: none reported yet
    marks: int = 0  # beats since `step` last changed
    saved: int = -1  # step of the newest checkpoint on disk; -1: none
    time: float = 0.0  # of the newest beat, or the rank's start, on the machine's monotonic clock
    limit_s: float = limits.FIRST_SILENCE_S  # the longest silence before the rank counts as stuck
    limit_by: int = 0  # what set it: 0: the default, 1: HANG_SECONDS, 2: beat(hang_seconds=)
    is_counted: bool = False  # the script reports no steps, so its optimizer's steps are counted


class Heart:
    """The rank's side of the heartbeat: record `number` in the agent's file `fd`.

    On the stack signal, every thread's stack is written to `stack_file`. For that, creating a Heart
    deletes and opens the file, registers a handler, and replaces this thread's signal stack. Raises
    ValueError if $HANG_SECONDS is not a number.
    """

    is_counted = False  # a launcher's hook beats after each step of an optimizer

    def __init__(self, fd: int, number: int, stack_file: Path) -> None:
        self._record = memoryview(mmap.mmap(fd, 0))[RECORD.size * number :]
        self._first_step = -1
        self._longest_s = 0.0
        self._limit_s = float(os.environ.get("HANG_SECONDS") or 0)
        self._limit_by = 1 if self._limit_s else 0  # see Beat.limit_by
        with contextlib.suppress(OSError):  # a full disk, a lost folder, a sandbox: no stacks
            stack_file.unlink(missing_ok=True)  # it may be a pipe or a link of another user
            self._stack_file = stack_file.open("w")  # stays open: the handler writes to it
            faulthandler.register(STACK_SIGNAL, self._stack_file, all_threads=True)
            _deepen_signal_stack()

    @property
    def newest(self) -> Beat:
        """The record, shared by two hearts if the script beats and its steps are also counted."""
        return Beat(*RECORD.unpack(self._record[: RECORD.size]))

    def _write(self, record: Beat) -> None:
        """Write the record into the agent's memory, over the previous one."""
        self._record[: RECORD.size] = RECORD.pack(*record)  # pack_into() would clear it first

    def beat(self, step: int | None, saved: int | None, hang_seconds: float | None) -> None:
        """Write the next record; the arguments are those of the function `beat` below."""
        now = time.monotonic()
        last = self.newest
        saved = last.saved if saved is None else saved
        if hang_seconds:
            self._limit_s = hang_seconds
            self._limit_by = 2
        elif step is None and last.is_counted:  # the script reports no steps: keep counting them
            self._write(last._replace(saved=saved, time=now))
            return

        silence_s = now - last.time
        # The agent would have ended the run after so long a silence, so the job was suspended. The
        # default limit does not end a run whose steps are counted.
        was_suspended = silence_s > last.limit_s and not self.is_counted
        if self._first_step < 0:
            self._first_step = -1 if step is None else step
        elif not was_suspended:
            self._longest_s = max(self._longest_s, silence_s)

        if step is None:
            step = last.step
            marks = last.marks
        elif step == last.step:
            marks = last.marks + 1
        else:
            marks = 0

        self._write(
            Beat(
                step=step,
                marks=marks,
                saved=saved,
                time=now,
                limit_s=self._limit_s or self._usual_limit(step),
                limit_by=self._limit_by,
                is_counted=self.is_counted,
            )
        )

    def _usual_limit(self, step: int) -> float:
        """Return the limit in seconds at a step, if neither the user nor the script has set one."""
        if step < self._first_step + 2:
            return limits.FIRST_SILENCE_S
        least_s = limits.FIRST_SILENCE_S if self.is_counted else limits.SILENCE_S
        return max(least_s, LIMIT_OF_LONGEST * self._longest_s)


def _deepen_signal_stack() -> None:
    """Replace faulthandler's signal stack, which five signals at the same moment overflow."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_size_t
    stack = libc.malloc(_SIGNAL_STACK_SIZE)  # never freed: signals come until the very end
    # struct stack_t: address, flags, size; see sigaltstack(2).
    libc.sigaltstack((ctypes.c_size_t * 3)(stack, 0, _SIGNAL_STACK_SIZE), None)


def beat(
    step: int | None = None, *, saved: int | None = None, hang_seconds: float | None = None
) -> None:
    """Report this rank's progress to the node agent; do nothing if there is none.

    Call it with the number of optimizer steps done, as often as you like within a step, from the
    same places on every rank. While one rank is working alone for a long time, for instance to
    save, call it on that rank without a step.

    Args:
        step: optimizer steps done.
        saved: the step of a checkpoint that has just reached the disk.
        hang_seconds: from now on, how many seconds this rank may be silent before it counts as
            stuck; None or 0 changes nothing. Until it is set, $HANG_SECONDS applies; if that is not
            set, 10 times the longest silence so far, but at least 60 s, and at least 600 s until
            two steps are done.
    """
    if heart := _heart():
        heart.beat(step, saved, hang_seconds)


@functools.cache
def _heart() -> Heart | None:
    """Return this process's Heart; None without a node agent, and in a program that a rank runs.

    The first call creates it, with the side effects of creating a Heart.
    """
    found = find_record(os.environ.get("HEARTBEAT_FILE", ""))
    if found is None:
        return None
    return Heart(*found, stack_file_of(Path(os.environ["TORCHELASTIC_ERROR_FILE"])))


def name_record(fd: int, number: int) -> str:
    """Return HEARTBEAT_FILE's value: the agent's open file, its identity, this rank's record."""
    status = os.fstat(fd)
    return f"{fd}:{status.st_dev}:{status.st_ino}:{number}"


def find_record(name: str) -> tuple[int, int] | None:
    """Return the descriptor and the number in what name_record() returned.

    None if the descriptor is another file, as it can be in a program that a rank runs.
    """
    with contextlib.suppress(OSError, ValueError):
        fd, *_, number = map(int, name.split(":"))
        if name_record(fd, number) == name:
            return fd, number
    return None


def stack_file_of(error_file: Path) -> Path:
    """Return the file for a rank's stacks, in the folder of its error file."""
    return error_file.with_suffix(".stack")
