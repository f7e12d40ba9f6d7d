"""The ranks of one node, seen by their agent: state, progress, and why each exited (no torch).

What each rank's process does after the fork is in launcher/agent/rank/program.py.
"""

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from distributed.heartbeat import RECORD, STACK_SIGNAL, Beat, name_record, stack_file_of
from launcher import descriptors, failure, own_time, processes
from launcher.agent.diagnosis import collectives, stuck
from launcher.agent.diagnosis.collectives import DUMP_SIGNAL
from launcher.agent.output.stream import Stream
from launcher.agent.rank import ending
from launcher.crash import read_crash
from launcher.failure import Failure
from launcher.preflight import cgroup
from launcher.processes import KILLED
from launcher.wire import limits
from launcher.wire.states import Calls, RankState

# What has set a rank's limit, by its Beat.limit_by.
_LIMITS = ("the default limit", "the limit, HANG_SECONDS,", "the limit, hang_seconds,")


@dataclass
class Rank:
    """One forked rank."""

    rank: int
    local_rank: int
    pid: int
    streams: tuple[Stream, Stream]  # stdout and stderr
    error_file: Path
    code: int | None = None  # as a shell reports it; None while the rank runs
    ended_at: float | None = None  # own_time.now() when its script was seen to have failed

    @property
    def stack_file(self) -> Path:
        return stack_file_of(self.error_file)

    def close(self) -> None:
        """Close the agent's ends of the rank's output streams."""
        for stream in self.streams:
            stream.close()


class Progress(Beat):
    """A rank's record, as its agent reads it."""

    @property
    def progress(self) -> tuple[int, int]:
        """How far the rank has got; equal for ranks that are in step with each other."""
        return self.step, self.marks

    @property
    def silence_s(self) -> float:
        """The seconds since the rank's latest beat or its start; 0 if it is not watched."""
        return own_time.since(self.time) if self.time else 0.0

    @property
    def ends_run(self) -> bool:
        """Whether silence ends the run.

        The default limit does not end it before a step is reported, or if steps are counted: the
        rank may be healthy but slow.
        """
        reports_steps = self.step >= 0 and not self.is_counted
        return self.limit_by > 0 or reports_steps


class Reached(NamedTuple):
    """How far the ranks of a node have got in all attempts so far; -1 means not at all."""

    saved: int  # the step of the newest checkpoint
    step: int  # the highest step since that checkpoint was reported


class Heartbeats:
    """Shared memory that the ranks write to: one record per local rank."""

    def __init__(self, ranks: int) -> None:
        self._fd = descriptors.anonymous_file("heartbeat")
        os.set_inheritable(self._fd, True)  # also for programs that a rank executes
        self._ranks = ranks
        self._reached = Reached(-1, -1)
        self.clear()

    def name(self, local_rank: int) -> str:
        """Return the value of HEARTBEAT_FILE that locates a rank's record."""
        return name_record(self._fd, local_rank)

    def clear(self) -> None:
        """Reset all records, and the states behind them, before new ranks start."""
        os.pwrite(self._fd, RECORD.pack(*Beat()) * self._ranks + bytes(self._ranks), 0)

    def read(self, local_rank: int) -> Progress:
        """Return a rank's latest beat."""
        return Progress(*RECORD.unpack(os.pread(self._fd, RECORD.size, RECORD.size * local_rank)))

    def ending(self, local_rank: int) -> int:
        """Return a rank's state in launcher/agent/rank/ending.py; 0 while its script runs."""
        return ending.read(self._fd, self._ranks)[local_rank]

    def step(self) -> int:
        """Return the highest step that any rank has reached since clear(); -1 if none has."""
        return max(self.read(local_rank).step for local_rank in range(self._ranks))

    def saved(self) -> int:
        """Return the step of the newest checkpoint that any rank has reported; -1 if none has."""
        return max(self.read(local_rank).saved for local_rank in range(self._ranks))

    def are_counted(self) -> bool:
        """Whether the optimizer hook counted the steps, because the script sends no heartbeats."""
        beats = map(self.read, range(self._ranks))
        return any(beat.is_counted and beat.step >= 0 for beat in beats)

    def reached(self) -> Reached:
        """Return the furthest that the ranks have got, also before clear(); keeps it for later."""
        now = Reached(max(self.saved(), self._reached.saved), self.step())
        self._reached = max(self._reached, now)
        return self._reached


@dataclass(frozen=True)
class NodeRanks:
    """All ranks of this node in one attempt."""

    all: Sequence[Rank]
    heartbeats: Heartbeats
    node_rank: int
    host: str
    _memory_kills: int = field(default_factory=cgroup.count_memory_kills)

    def living(self) -> list[Rank]:
        """Return the ranks that are still running."""
        return [each for each in self.all if each.code is None]

    def send(self, signum: int) -> None:
        """Send a signal to every living rank."""
        processes.send([each.pid for each in self.living()], signum)

    def reap(self) -> Iterator[Rank]:
        """Reap exited processes, also orphans that the agent adopted. Yields the ranks of these.

        A rank is yielded once its output is read; after exit code 0, its traceback is shown. Until
        the last one is yielded, some are still among living().
        """
        statuses = dict(processes.reap())
        for each in self.living():
            if each.pid not in statuses:
                continue
            each.code = processes.exit_code(statuses[each.pid])
            for stream in each.streams:
                stream.drain()
                if each.code == 0 and stream.view is not None:  # the script caught the exception
                    stream.view.show_traceback()
            yield each

    def show_held(self, now: float, is_ending: bool) -> bool:
        """Show output that has been held back long enough. Returns whether any is still held back.

        `now` is a time before the streams were last read. If a rank is still running long after it
        printed a traceback, it has caught the exception. While the run is ending, this cannot be
        known.
        """
        is_waiting = False
        for each in self.all:
            limit_s = limits.RAISED_S if os.path.exists(each.error_file) else limits.TRACEBACK_S
            has_gone_on = each.code is None and not is_ending
            for stream in each.streams:
                is_waiting |= stream.show_held(now, limit_s if has_gone_on else math.inf)
        return is_waiting

    def straggler(self) -> RankState | None:
        """Return the rank furthest behind; None if none is alive."""
        return stuck.find_straggler([self._state(each) for each in self.living()])

    def _state(self, each: Rank) -> RankState:
        """Return what a living rank is doing now; it is stuck if it is silent beyond its limit."""
        beat = self.heartbeats.read(each.local_rank)
        silence_s = beat.silence_s
        return RankState(
            rank=each.rank,
            progress=beat.progress,
            is_stuck=silence_s > beat.limit_s,
            is_stopped=processes.is_stopped(each.pid),
            silence_s=silence_s,
            ends_run=beat.ends_run,
        )

    def describe_end(self, each: Rank) -> Failure:
        """Return why a rank has exited or is exiting, from its error file, output or exit code."""
        out, err = each.streams
        line = err.traceback_line or err.last_line or out.last_line
        log = failure.short_path(str(out.log.path)) if out.log.path else ""
        unknown = self._unknown_failure(each)

        raised = failure.read_error(each.error_file)
        is_uncaught = err.traceback_line > 0 and each.code == 1  # 1: as Python exits
        if raised is None and is_uncaught:
            raised = failure.read_traceback(err.last_text, unknown.time)
        raised = raised or read_crash(err.recent_lines, each.code or 0, unknown.time)

        return failure.describe_end(
            replace(unknown, log=f"{log}:{line}" if line and out.log.is_kept else log),
            raised,
            code=each.code,
            is_out_of_memory=cgroup.count_memory_kills() > self._memory_kills,
            last_text=err.last_text,
        )

    def time_exits(self, save_s: float) -> list[Rank]:
        """Time the exits of ranks whose script has ended with an error. Returns the late ones.

        They have RAISED_S to exit, or `save_s` seconds, if that is longer, while they may be
        saving. One that waits for its checkpoint sends heartbeats. The time counts from the first
        call that finds a script ended, which sets Rank.ended_at.
        """
        late = []
        for each in self.living():
            state = self.heartbeats.ending(each.local_rank)
            if not state:  # its script is running
                continue
            if each.ended_at is None:
                each.ended_at = own_time.now()

            time_s = own_time.now() - each.ended_at
            has_beaten = self.heartbeats.read(each.local_rank).silence_s < time_s  # since it ended
            limit_s = limits.RAISED_S
            if state == ending.MAY_SAVE or has_beaten:
                limit_s = max(save_s, limit_s)
            if time_s >= limit_s:
                late.append(each)
        return late

    def examine_stuck(self, suspect: int) -> Failure | None:
        """Have the ranks here write their stacks. Returns the failure of a run stuck by `suspect`.

        If the suspect is on another node, the failure is that of the first rank here, and counts as
        a consequence. Returns None if no rank is alive. Resumes stopped ranks, and blocks while all
        write their stacks and collectives.
        """
        living = self.living()
        if not living:
            return None

        named = next((each for each in living if each.rank == suspect), living[0])
        beat = self.heartbeats.read(named.local_rank)
        cause = f"no progress reported for {beat.silence_s:.0f} s"
        if beat.step < 0:
            cause += ", before its first step"
        if processes.is_stopped(named.pid):
            cause += f", and {stuck.STOPPED}"
        cause += f"; {_LIMITS[beat.limit_by]} is {beat.limit_s:.0f} s"

        unknown = self._unknown_failure(named)  # before collect_stacks() resumes a stopped rank
        stacks = self.collect_stacks(are_ending=True)
        remarks = collectives.find_mismatches(self.collect_calls())
        return replace(
            unknown,
            fault="rank-stuck",
            cause=cause,
            code=KILLED,
            frames=stacks[named.rank],
            stacks={**stuck.group_stacks(stacks), **dict.fromkeys(remarks, ())},
            is_consequence=named.rank != suspect,
            log=failure.short_path(str(named.stack_file)),
        )

    def collect_stacks(self, *, are_ending: bool = False) -> dict[int, list[str]]:
        """Have the living ranks write their stacks. Returns each rank's stack, or its exit.

        Blocks for up to STACKS_WRITE_S. Stopped ranks cannot write; with `are_ending`, they are
        resumed, and the call may take twice as long. The stack is empty for a rank that does not
        handle the signal, such as one that imports torch itself and sends no heartbeats.
        """
        living = self.living()
        stopped = [each for each in living if processes.is_stopped(each.pid)]
        able = [each for each in living if processes.has_signal(each.pid, "SigCgt", STACK_SIGNAL)]
        running = [each for each in able if each not in stopped]
        resumed = [each for each in able if each in stopped and are_ending]
        sizes = ask_for_stacks(running)
        resumed_sizes = ask_for_stacks(resumed)
        stuck.wait_for_stacks(sizes, limits.STACKS_WRITE_S)
        if resumed:
            processes.send([each.pid for each in stopped], signal.SIGCONT)
            stuck.wait_for_stacks(resumed_sizes, limits.STACKS_WRITE_S)

        stacks = {}
        for each in self.all:
            if each in running or each in resumed:
                stacks[each.rank] = stuck.read_stack(each.stack_file)
            elif each in stopped:
                stacks[each.rank] = [stuck.STOPPED]
            else:
                stacks[each.rank] = [] if each.code is None else [f"exited with code {each.code}"]
        return stacks

    def collect_calls(self) -> dict[int, Calls]:
        """Return the latest collectives of each living rank for which torch records them.

        Such a rank blocks DUMP_SIGNAL (flight_recorder.py). Waits up to STACKS_WRITE_S for all.
        """
        living = self.living()
        asked = [each for each in living if processes.has_signal(each.pid, "SigBlk", DUMP_SIGNAL)]
        files = {each.rank: collectives.file_of(each.error_file) for each in asked}
        for file in files.values():
            with contextlib.suppress(OSError):  # it does not exist, or the disk is read-only
                file.unlink()
        processes.send([each.pid for each in asked], DUMP_SIGNAL)
        return collectives.read(files, limits.STACKS_WRITE_S)

    def _unknown_failure(self, each: Rank) -> Failure:
        """Return a failure of a rank at this moment, as far as it is known without the cause."""
        beat = self.heartbeats.read(each.local_rank)
        return Failure(
            fault="rank-error",
            cause="",
            code=1,
            host=self.host,
            node_rank=self.node_rank,
            time=time.time(),
            rank=each.rank,
            local_rank=each.local_rank,
            step=beat.step,
            saved_step=beat.saved,
        )


def ask_for_stacks(ranks: Sequence[Rank]) -> dict[Path, int]:
    """Have ranks write their stacks. Returns the sizes of their files before that."""
    sizes = {each.stack_file: stuck.size_of(each.stack_file) for each in ranks}
    processes.send_to_main_threads([each.pid for each in ranks], STACK_SIGNAL)
    return sizes
