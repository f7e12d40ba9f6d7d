"""Whether a failed run restarts its ranks, and the record of its restarts (no torch)."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distributed.errors import BAD_INPUT, CANNOT_START
from launcher.agent.node_ranks import Heartbeats
from launcher.failure import Failure
from launcher.record.restart import Restart
from launcher.record.run_json import LiveRecord, end_fields
from launcher.text import Say

# Faults that would make the next attempt fail too.
_INCURABLE = {
    "config-invalid",
    "duplicate-gpu",
    "env-missing",
    "no-such-interface",
    "parameters-unused",
    "too-few-gpus",
    "torch-without-gpu",
    "version-mismatch",
    "wrong-world",
}
# Faults that come from outside say nothing about the next attempt.
_FROM_OUTSIDE = {"agent-killed", "launcher-killed", "link-lost", "node-lost", "rank-killed"}


@dataclass
class Restarts:
    """All restarts of a run."""

    most: int
    beats: Heartbeats  # of the ranks here
    record: LiveRecord | None = None  # run.json, on node rank 0
    has_begun: bool = False  # the run has completed a step, whose time is in the record
    all: list[Restart] = field(default_factory=list)  # since this agent became node rank 0
    before: tuple[int, int] = (-1, -1)  # what the ranks had reached when the attempt began

    def begin_attempt(self) -> None:
        """Keep the progress so far in `before`, and reset the heartbeats for the next ranks."""
        self.before = self.beats.reached()
        self.beats.clear()

    def why_stop(self, first: Failure, held_step: int) -> str:
        """Return why the run does not restart after a failure; empty if it does.

        It does not if the next attempt would fail in the same way, if the same step has failed
        twice with the same cause, or if the last restart made no progress. `held_step` is the step
        of the newest snapshot in memory, or -1 if there is none.
        """
        # 126: a program that cannot be executed.
        if first.fault in _INCURABLE or first.code in (BAD_INPUT, CANNOT_START - 1, CANNOT_START):
            return f"not restarting: it would fail the same way ({first.fault})"
        if first.cannot_import:
            return f"not restarting: it would fail the same way ({first.cause})"
        if not self.all or first.fault in _FROM_OUTSIDE:
            return ""

        last = self.all[-1]
        is_same = (first.step, first.fault, first.cause) == (last.step, last.fault, last.cause)
        if is_same and first.step >= 0:
            return f"not restarting: step {first.step} failed twice with the same cause"

        # Progress is unknown if steps are counted, because the script may start over at step 0, or
        # if the ranks have reported nothing.
        is_known = not self.beats.are_counted()
        is_new = self.before == (-1, -1) or self.beats.reached() != self.before
        if is_known and not is_new and held_step <= last.saved_step:
            return f"not restarting: restart {last.number} made no progress"
        return ""

    def record_restart(
        self,
        first: Failure,
        held_step: int,
        number: int,
        *,
        lost: Sequence[str],  # the hosts of lost nodes
        replaced: Sequence[str],  # which spares replace them
    ) -> str:
        """Record that the run is restarting for the `number`th time. Returns the cost in one line.

        From now on, the time lost counts towards this restart, no longer towards the last one.
        `held_step` is the step of the newest snapshot in memory, or -1 if there is none.
        """
        if last := self._unrepeated:
            self.all[-1] = replace(last, lost_s=first.time - last.failed)

        saved_step, step = self.beats.reached()
        kept_step = max(saved_step, held_step)
        # The failure of a node's agent (rank -1) has no step, so the step of the ranks here counts.
        # Without a save, it stays unknown what is lost: the script may not save at all.
        is_agents = first.rank < 0
        restart = Restart(
            number=number,
            fault=first.fault,
            cause=first.cause,
            who=first.who,
            step=step if is_agents and kept_step >= 0 else first.step,
            saved_step=kept_step,
            is_from_memory=held_step > saved_step,
            failed=first.time,
            is_counted=self.beats.are_counted(),
            lost=tuple(lost),
            replaced=tuple(replaced),
        )

        self.all.append(restart)
        self.write()
        return restart.describe(self.most)

    @property
    def _unrepeated(self) -> Restart | None:
        """The last restart, until the ranks have repeated the steps that it lost."""
        return self.all[-1] if self.all and not self.all[-1].lost_s else None

    def stop_if_taken_over(self, say: Say) -> None:
        """If the scheduler has started this job again, say so, and send this process SIGTERM."""
        if self.record and self.record.notice_takeover():
            say("the scheduler has started this job again; stopping this start")
            signal.raise_signal(signal.SIGTERM)

    def record_progress(self) -> None:
        """Record progress, the time of the first step, and the time lost by a restart."""
        step = self.beats.step()
        if self.record:
            self.record.note_progress(*self.beats.reached())
        if step >= 0 and not self.has_begun:
            self.has_begun = True
            self.write(first_step=time.time())
        last = self._unrepeated
        if last and step >= max(0, last.step):
            self.all[-1] = replace(last, lost_s=time.time() - last.failed)
            self.write()

    def end(self, code: int) -> None:
        """Record how the run ended."""
        saved_step, step = self.beats.reached()
        self.write(step=step, saved_step=saved_step, **end_fields(code))

    def write(self, **more: Any) -> None:
        """Write all restarts, and any other given fields, to the record."""
        if self.record:
            self.record.write_fields(restarts=[*self.record.earlier.restarts, *self.all], **more)
