"""Whether a SLURM job that ends is put back into the queue, and what that needs."""

import contextlib
import re
import signal
import subprocess
from collections.abc import Callable, Collection

from distributed.errors import STOPPED
from distributed.job import job_id
from distributed.stop_signals import NOTICES, handled_signals
from launcher.interrupt import leave_unstarted
from launcher.outcome import Outcome
from launcher.plan import slurm
from launcher.plan.plan import Plan
from launcher.text import open_own, warn

MOST_STARTS = 4  # in a row without a new checkpoint


def choose_requeue(
    plan: Plan, code: int, asked: Collection[int], outcome: Outcome | None
) -> Callable[[Plan], bool] | None:
    """Return the function that requeues the job, after a preemption or a notice; otherwise None.

    Asks SLURM whether it preempts the job.
    """
    has_failed = outcome and outcome.failure
    is_stopped = code in (STOPPED, 128 + signal.SIGTERM) and not has_failed
    # SLURM requeues a preempted job only if it is still running when its grace time ends.
    if is_stopped and "REQUEUE" in slurm.preempt_mode(plan.environ):
        return requeue

    # 128 + SIGUSR1: no rank had saved. With checkpoints, the job can start again all the same.
    has_saved = code == STOPPED or (code - 128 in NOTICES and plan.checkpoint_dir)
    has_notice = not {*asked}.isdisjoint(NOTICES)
    return requeue_after_notice if has_saved and has_notice else None


def requeue_after_notice(plan: Plan) -> bool:
    """Record the newest checkpoint. Requeue the job, unless its last starts had the same one.

    Returns False if the user has to resume: the job was cancelled, or SLURM rejects the request.
    """
    job = job_id(plan.environ)
    if slurm.chain_of(plan.environ):
        return True  # see requeue()
    if slurm.has_ended(job):  # scancel came after the notice
        return False

    newest = record_newest(plan)
    if len(newest) == MOST_STARTS and len({*newest}) == 1:
        warn(f"{plan.program}: {MOST_STARTS - 1} restarts made no progress; not requeuing the job")
        return True
    if not requeue(plan):
        return False

    limit = slurm.ask_scontrol("job", job).get("TimeLimit", "")
    if re.match("00:0[0-3]:", limit):  # a notice may come 60 s early
        cause = f"the notice comes at once, or nearly so, if the time limit is {limit}"
        cure = "ask for more --time, or for a later notice: --signal=B:USR1@30"
        warn(f"{plan.program}: warning: {cause}; {cure} [time-limit]")
    return True


def requeue(plan: Plan) -> bool:
    """Put the job back into the queue, and say so; SLURM starts it again under the same id.

    Returns False if SLURM rejects the request. Does nothing in a chain: the next job resumes.
    """
    if slurm.chain_of(plan.environ):
        return True
    job = job_id(plan.environ)
    is_back = subprocess.run(["scontrol", "requeue", job]).returncode == 0
    if is_back:
        warn(f"requeued job {job}; it resumes when SLURM starts it again")
    return is_back


def record_newest(plan: Plan) -> list[str]:
    """Add the newest checkpoint's name to a file in the run's folder, which has one per start.

    Returns the last MOST_STARTS; none if that fails, or if no folder of checkpoints is known.
    """
    if not plan.checkpoint_dir:
        return []
    folder = plan.directory / plan.checkpoint_dir / plan.run_id
    steps = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    newest = max(map(int, filter(str.isdecimal, steps)), default=0)
    record = plan.folder / "requeues"
    with contextlib.suppress(OSError):  # a full disk is no reason not to requeue the job
        plan.folder.mkdir(parents=True, exist_ok=True)
        with open_own(record, "a") as file:
            print(f"step-{newest}", file=file)
        return record.read_text().splitlines()[-MOST_STARTS:]
    return []


def block_signals() -> None:
    """Keep all signals pending: SLURM ends a requeued job with SIGTERM, then SIGKILL (KillWait)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, handled_signals())


def leave_if_stopped(plan: Plan) -> None:
    """Exit if a preemption or the end of the job has ended the step before the agents started.

    Asks SLURM, and requeues the job if its preemption allows that. scancel and preemptions signal
    steps before the batch script, so no signal has told this process yet.
    """
    mode = slurm.preempt_mode(plan.environ)
    if "REQUEUE" in mode:
        block_signals()
        requeue(plan)
    if mode or slurm.has_ended(plan.job):
        leave_unstarted(signal.SIGTERM)
