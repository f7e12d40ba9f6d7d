"""Parts of sharded snapshots on other nodes: a run that loses a node loses none of them."""

from __future__ import annotations

import os
import re
import signal

import pytest
from recovery import SHARDED, Job, Outcome, await_snapshot

TAKEN = (*SHARDED, "checkpoint.snapshot_every=5", "checkpoint.every=0")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def whole(job: Job) -> Outcome:
    """What two ranks come to that nobody stops, and that take no snapshots."""
    return job.finish("whole", 2, *SHARDED)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_goes_on_with_what_the_lost_node_held(job: Job, whole: Outcome, lost: int) -> None:
    name = f"lost-{lost}"
    with job.nodes(name, 2, *TAKEN, spares=1, PACE="0.05") as runs:
        await_snapshot(runs[1 - lost], 25)
        os.kill(runs[lost].agent_pid(), signal.SIGKILL)
        others = [run for place, run in enumerate(runs) if place != lost]
        told = "".join(run.finish() + run.output for run in others)
    assert [run.process.returncode for run in others] == [0, 0], told
    (resumed,) = re.findall(r"resumed +after step (\d+), from memory", told)
    assert int(resumed) >= 20, told
    assert job.outcome(name) == whole
