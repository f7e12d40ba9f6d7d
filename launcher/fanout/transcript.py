"""Copy terminal output to a file in <log dir>/distributed_training/ (scripts/cluster_train.sh)."""

import os
import signal
import time
from pathlib import Path

from distributed.lock import update_link
from distributed.stop_signals import stop_signals
from launcher.plan.plan import Plan
from launcher.record.run_json import writing_to


def new_file(plan: Plan) -> Path:
    """Return the path of a new transcript. Makes its folder and the link `latest_node<rank>.log`.

    The file itself is left to the caller. Raises Refused if the folder cannot be written to.
    """
    folder = plan.directory / plan.log_dir / "distributed_training"
    name = f"cluster_train_{time.strftime('%Y%m%d-%H%M%S')}_node{plan.node_rank}.log"
    with writing_to(folder):
        update_link(folder / f"latest_node{plan.node_rank}.log", name)
    return folder / name


def copy_output_to(file: Path) -> None:
    """From now on, also write stdout and stderr of this process to a file, through tee.

    tee ignores the signals that stop the run, so that it also copies how the run ends.
    """
    reader, writer = os.pipe()
    if os.fork() == 0:
        for signum in stop_signals():
            signal.signal(signum, signal.SIG_IGN)
        os.dup2(reader, 0)
        os.execvp("tee", ["tee", "-a", "--", str(file)])

    for fd in (1, 2):
        os.dup2(writer, fd)
    os.close(reader)
    os.close(writer)
