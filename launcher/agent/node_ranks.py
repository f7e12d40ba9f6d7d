"""The ranks of one node as their agent sees them: who lives, how far, and why one ended (no torch).

The ranks' own side, what each process does after the fork, is launcher/agent/rank.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distributed.heartbeat import Beat, stack_file_of
from launcher import failure, processes
from launcher.agent import stacks, verdict
from launcher.agent.heartbeats import Heartbeats
from launcher.agent.output import Stream
from launcher.agent.stuck import RankState, Straggler, find_straggler
from launcher.failure import Failure


@dataclass
class Rank:
    """One forked rank."""

    rank: int
    local_rank: int
    pid: int
    pidfd: int
    streams: tuple[Stream, Stream]  # of stdout and stderr
    error_file: Path
    code: int | None = None  # as a shell shows it; None while it runs

    @property
    def stack_file(self) -> Path:
        return stack_file_of(self.error_file)

    def close(self) -> None:
        """Close the agent's ends: its descriptor of the process, and of its output."""
        os.close(self.pidfd)
        for stream in self.streams:
            stream.close()


class NodeRanks:
    """All ranks of this node in one attempt."""

    def __init__(
        self, ranks: Sequence[Rank], heartbeats: Heartbeats, node_rank: int, host: str
    ) -> None:
        """
        Args:
            heartbeats: the ranks' records; the caller closes them.
        """
        self.all = ranks
        self.heartbeats = heartbeats
        self.node_rank = node_rank
        self.host = host
        self._memory_kills = failure.count_memory_kills()

    def living(self) -> list[Rank]:
        """Return the ranks that have not ended."""
        return [each for each in self.all if each.code is None]

    def send(self, signum: int) -> None:
        """Send a signal to every living rank."""
        processes.send([each.pid for each in self.living()], signum)

    def wait(self, each: Rank) -> int:
        """Note the end of a rank that has ended; returns its exit code as a shell shows it."""
        os.close(each.pidfd)
        each.code = processes.exit_code(os.waitpid(each.pid, 0)[1])
        for stream in each.streams:
            stream.drain()
        return each.code

    def straggler(self) -> Straggler | None:
        """Return the rank furthest behind; None where none lives."""
        return find_straggler([self._state(each) for each in self.living()])

    def _state(self, each: Rank) -> RankState:
        beat, is_stopped = self.heartbeats.read(each.local_rank), processes.is_stopped(each.pid)
        return RankState(each.rank, beat.progress, beat.silence_s, beat.limit_s, is_stopped)

    def describe_end(self, each: Rank) -> Failure:
        """Return why a rank has ended, or is about to: from its error file, else its exit code."""
        out, err = each.streams
        line = err.traceback_line or err.last_line or out.last_line
        log = failure.short_path(str(out.log.path)) if out.log.path else ""
        unknown = self._unknown_failure(each, self.heartbeats.read(each.local_rank))
        return verdict.describe_end(
            replace(unknown, log=f"{log}:{line}" if log and line else log),
            failure.read_error(each.error_file),
            code=each.code or 1,
            is_out_of_memory=failure.count_memory_kills() > self._memory_kills,
            last_text=err.last_text,
        )

    def describe_stuck(self, suspect: int) -> Failure | None:
        """Return the failure of a run that `suspect` holds up, with the stacks of all ranks here.

        Where the suspect is a rank of another node, the first rank here has failed as a
        consequence. None where no rank lives. Blocks while the ranks write their stacks.
        """
        living = self.living()
        if not living:
            return None
        named = next((each for each in living if each.rank == suspect), living[0])
        beat = self.heartbeats.read(named.local_rank)
        cause = f"no sign of life for {beat.silence_s:.0f} s"
        if processes.is_stopped(named.pid):
            cause += ", its process is stopped (SIGSTOP)"
        cause += f"; the limit, distributed.hang_seconds, is {beat.limit_s:.0f} s"
        collected = stacks.collect_stacks([self._stack_source(each) for each in living])
        return replace(
            self._unknown_failure(named, beat),
            fault="rank-stuck",
            cause=cause,
            code=128 + signal.SIGKILL,
            frames=collected[named.rank],
            stacks=stacks.group_stacks(collected),
            is_consequence=named.rank != suspect,
            log=failure.short_path(str(named.stack_file)),
        )

    def _stack_source(self, each: Rank) -> stacks.Source:
        is_beating = self.heartbeats.read(each.local_rank).step >= 0
        is_stopped = processes.is_stopped(each.pid)
        return stacks.Source(each.rank, each.pid, each.stack_file, is_beating, is_stopped)

    def _unknown_failure(self, each: Rank, beat: Beat) -> Failure:
        """Return what holds for any failure of a rank here."""
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
