"""How a run on several nodes ended, as its launcher sees it (no torch)."""

import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from distributed.errors import BAD_INPUT, CANNOT_START, REFUSED, STOPPED
from launcher.failure import Failure, signal_name
from launcher.outcome import Account, Basis, Outcome, choose
from launcher.plan.plan import Plan
from launcher.plan.slurm import in_batch_script, is_at_time_limit
from launcher.processes import KILLED
from launcher.text import short_host_name

_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class NodePart:
    """How one node's part of a run ended, as its launcher knows it."""

    host: str
    code: int | None  # the agent's; None: it has not ended
    told: Outcome | None  # by the agent, or by its supervisor instead
    lost: str = ""  # why the launcher gave up on the node
    is_reachable: bool = True  # when the launcher checked again
    is_silent: bool = False  # when the launcher gave up on it


def as_slurm_ended(outcome: Outcome, plan: Plan) -> Outcome:
    """Return the outcome with SIGTERM's code, if SLURM ended the run and no rank saved.

    Asks scontrol. A time limit is a failure because, unlike with scancel, nobody asked for a stop.
    """
    is_stopped = not outcome.failure and outcome.code not in (0, STOPPED)  # STOPPED: ranks saved
    if not is_stopped or outcome.signum == signal.SIGINT:
        return outcome

    code = 128 + signal.SIGTERM
    if is_at_time_limit(plan.environ):
        cause = "SLURM ended the job at its time limit, before the ranks had saved and exited"
        failure = Failure("time-limit", cause, code, short_host_name(), -1, time.time())
        return replace(outcome, code=code, failure=failure)
    # In a batch script, SIGTERM comes from SLURM; in salloc's shell, perhaps from a person.
    is_cancelled = outcome.signum == signal.SIGTERM and in_batch_script(plan.environ)
    return replace(outcome, code=code) if is_cancelled else outcome


@dataclass(frozen=True)
class LaunchEnd:
    """What a launcher knows about the end of a run on several nodes, which has just ended."""

    plan: Plan
    parts: Sequence[NodePart]  # by node rank
    started: float  # seconds since the epoch
    stopped_by: int  # the signal that the launcher passed on, or 0
    still_s: float = 0.0  # how long the launcher was suspended just before the end

    def outcome(self) -> Outcome:
        """Return the account that counts, of all that can be given of how the run ended."""
        return choose([*self._told(), *self._losses(), *self._unreported(), *self._others()])

    def _told(self) -> Iterator[Account]:
        """Yield what the agents reported, with this launcher's run id and command."""
        for told in (part.told for part in self.parts if part.told):
            # A node does not choose what the user pastes.
            command = self.plan.run_variables()["LAUNCH_COMMAND"] if told.command else ""
            outcome = replace(told, run_id=self.plan.run_id, command=command)
            failure = outcome.failure
            if not failure:
                yield Basis.STOP if outcome.code else Basis.DONE, outcome
            elif failure.is_consequence:
                yield Basis.CONSEQUENCE, outcome
            elif failure.rank >= 0:
                yield Basis.CAUSE, outcome
            elif failure.code == _TERMINATED:  # srun terminates the tasks of the other nodes
                yield Basis.CONSEQUENCE, outcome
            else:
                yield Basis.LOST_AGENT, outcome

    def _losses(self) -> Iterator[Account]:
        """Yield at most one account: why nodes were lost, or why all lost their launcher."""
        has_gone_well = {part.code for part in self.parts} <= {0, STOPPED}
        if self.still_s and not (self.stopped_by or has_gone_well):
            cause = f"the launcher was suspended for {self.still_s:.0f} s (SIGSTOP, Ctrl-Z, sleep)"
            cause += f"; nodes end a run after {self.plan.silence_s:g} s without a heartbeat"
            yield Basis.SILENCE, self._blame(-1, "launcher-killed", cause)
            return

        lost = [node for node, part in enumerate(self.parts) if part.lost or part.code is None]
        silent = [node for node in lost if self.parts[node].is_silent]
        have_reported = all(self.parts[node].code is not None for node in lost)
        have_ended = lost == silent and have_reported  # they were only silent for a while
        if not lost or (have_ended and has_gone_well):
            return

        # If the nodes ended their parts, an error that an agent reported may be the cause.
        basis = Basis.SILENCE if have_ended else Basis.LOST_NODE
        # If all are silent, the launcher's own network is to blame (-1), not the nodes.
        if len(self.parts) > 1 and len(silent) == len(self.parts):
            cause = f"no heartbeat from any node for {self.plan.silence_s:g} s (network down?)"
            yield basis, self._blame(-1, "link-lost", cause)
            return

        # If every node can be reached again, ssh was killed, here or there, rather than cut off.
        is_unreachable = silent or not all(part.is_reachable for part in self.parts)
        first = (silent or lost)[0]
        cause = self.parts[first].lost or "this node did not end its part of the run in time"
        yield basis, self._blame(first, "link-lost" if is_unreachable else "launcher-killed", cause)

    def _unreported(self) -> Iterator[Account]:
        """Yield accounts of the agents that reported nothing, judged by their exit codes."""
        engine = self.plan.engine  # starts the ranks instead of the node agent; reports nothing
        told = {part.told.code for part in self.parts if part.told}  # other agents exit with it too

        for node, part in enumerate(self.parts):
            code = part.code
            if not code or code in told:
                pass  # it succeeded or did not end (_losses()), or a report explains the code
            elif code == CANNOT_START:
                cause = "the node agent was not started; the lines above say why"
                yield Basis.NOT_STARTED, self._blame(node, "env-missing", cause, code)
            elif code in (BAD_INPUT, REFUSED) and not engine:
                yield Basis.REFUSAL, self._outcome(code)
            elif self.stopped_by:
                pass  # as _others() reports
            elif engine:
                cause = f"a rank failed; the report of {engine} is above"
                yield Basis.NO_REPORT, self._blame(node, "rank-error", cause, code)
            else:
                cause = "the node agent ended without a report"
                if name := signal_name(code):
                    cause = f"{name} to the node agent, from outside this run"
                yield Basis.NO_REPORT, self._blame(node, "agent-killed", cause, code)

    def _others(self) -> Iterator[Account]:
        """Yield the accounts that count if there is no other: the launcher's stop, and success."""
        if self.stopped_by and any(part.code for part in self.parts):
            yield Basis.STOP, self._outcome(128 + self.stopped_by)
        yield Basis.DONE, self._outcome(0)

    def _blame(self, node: int, fault: str, cause: str, code: int = KILLED) -> Outcome:
        """Return the outcome for a failure of a node, or of the launcher's own machine (-1)."""
        has_log = node >= 0 and not self.plan.engine
        log = f"{self.plan.log_dir}/{self.plan.run_id}/node_{node}.log" if has_log else ""
        host = self.parts[node].host if node >= 0 else short_host_name()
        return self._outcome(code, Failure(fault, cause, code, host, node, time.time(), log=log))

    def _outcome(self, code: int, failure: Failure | None = None) -> Outcome:
        """Return this outcome, with the command that resumes the run if checkpoints are known.

        Without a known folder of checkpoints, only an agent knows whether the run can resume.
        """
        plan = self.plan
        command = plan.run_variables()["LAUNCH_COMMAND"] if plan.checkpoint_dir else ""
        return Outcome(code, failure, started=self.started, run_id=plan.run_id, command=command)
