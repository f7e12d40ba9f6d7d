"""How a SLURM job returns to the queue: after a notice, or after a preemption."""

import re
import subprocess

from distributed.job import job_id
from launcher.plan import slurm
from launcher.plan.plan import Plan
from launcher.text import open_own, warn

MOST_STARTS = 4  # in a row without a new checkpoint


def requeue_after_notice(plan: Plan) -> bool:
    """Requeue the job, unless its last starts ended with the same checkpoint: then it ends.

    Returns False if the user has to resume the run, because the user has cancelled the job or SLURM
    rejects the request.
    """
    job = job_id(plan.environ)
    if slurm.chain_of(plan.environ):
        return True  # see requeue()
    if slurm.has_ended(job):  # scancel came after the notice
        return False

    newest = note_newest(plan)
    if len(newest) == MOST_STARTS and len({*newest}) == 1:
        cause = f"{MOST_STARTS - 1} restarts made no progress"
        warn(f"{plan.program}: {cause}; not requeuing the job")
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
    # SLURM ends the requeued job with SIGTERM, which is blocked here and in scontrol, and sends
    # SIGKILL only after KillWait, so there is time to print the line below.
    is_back = subprocess.run(["scontrol", "requeue", job]).returncode == 0
    if is_back:
        warn(f"requeued job {job}; it resumes when SLURM starts it again")
    return is_back


def note_newest(plan: Plan) -> list[str]:
    """Add the newest checkpoint's name to a file in the run's folder, which has one per start.

    Returns the last MOST_STARTS; none, and adds none, if the folder of checkpoints is not known.
    """
    if not plan.checkpoint_dir:
        return []
    folder = plan.directory / plan.checkpoint_dir / plan.run_id
    steps = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    newest = max(map(int, filter(str.isdecimal, steps)), default=0)
    record = plan.folder / "requeues"
    record.parent.mkdir(parents=True, exist_ok=True)
    with open_own(record, "a") as file:
        print(f"step-{newest}", file=file)
    return record.read_text().splitlines()[-MOST_STARTS:]
