"""Which failures restart a run, and what its restarts cost."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from agents import Run, written

from distributed.heartbeat import Heart, find_record
from launcher.agent.node_ranks import Heartbeats
from launcher.agent.rank.optimizer_steps import CountedHeart
from launcher.agent.restarts import Restarts
from launcher.failure import Failure
from launcher.record.restart import Restart

FAILURE = Failure(
    fault="rank-error",
    cause="ValueError: batch 57 holds no samples",
    code=1,
    host="node2",
    node_rank=1,
    time=time.time(),
    rank=3,
    local_rank=1,
    step=57,
)
LACKING = "ModuleNotFoundError: No module named 'x'"


class Beating:
    """The records of one rank that beats."""

    def __init__(self, folder: Path, *, is_counted: bool = False) -> None:
        self.beats, self.folder, self.is_counted = Heartbeats(1), folder, is_counted
        self.start()

    def start(self) -> None:
        self.beats.clear()
        place = find_record(self.beats.name(0))
        assert place is not None
        kind = CountedHeart if self.is_counted else Heart
        self.heart = kind(*place, self.folder / "x.stack")

    def reach(self, step: int, saved: int | None = None) -> Heartbeats:
        self.heart.beat(step, saved, None)
        return self.beats


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"fault": "rank-killed", "code": 137}, ""),
        ({"fault": "out-of-memory", "code": 1}, ""),
        ({"code": 127}, "rank-error"),
        ({"fault": "config-invalid"}, "config-invalid"),
        ({"cause": LACKING, "cannot_import": True}, LACKING),
        ({"cause": f"RuntimeError: {LACKING}"}, ""),
    ],
)
def test_what_no_restart_can_cure(change: dict[str, object], why: str) -> None:
    failure = replace(FAILURE, **change)  # type: ignore[arg-type]
    told = why and f"not restarting: it would fail the same way ({why})"
    assert Restarts(3, Heartbeats(1)).why_stop(failure, -1) == told


@pytest.mark.parametrize(
    ("fault", "step", "is_loop"),
    [
        ("rank-error", 57, True),
        ("loss-not-finite", 57, True),
        ("rank-error", 58, False),
        ("rank-error", -1, False),  # a script that reports no step
        ("rank-killed", 57, False),
    ],
)
def test_the_same_step_twice_with_the_same_cause_ends_the_run(
    fault: str, step: int, is_loop: bool
) -> None:
    restarts = Restarts(9, Heartbeats(1))
    failure = replace(FAILURE, fault=fault, step=57 if step >= 0 else -1)
    restarts.record_restart(failure, -1, 1, lost=(), replaced=())
    told = restarts.why_stop(replace(failure, step=step), -1)
    loop = f"not restarting: step {step} failed twice with the same cause"
    assert told == (loop if is_loop else "")
    assert restarts.why_stop(replace(failure, step=step, cause="another"), -1) == ""


@pytest.mark.parametrize(("is_counted", "is_last"), [(False, True), (True, False)])
def test_a_restart_that_gained_nothing_is_the_last(
    tmp_path: Path, is_counted: bool, is_last: bool
) -> None:
    rank = Beating(tmp_path, is_counted=is_counted)
    restarts = Restarts(9, rank.reach(57))
    assert restarts.why_stop(FAILURE, -1) == ""
    restarts.record_restart(FAILURE, -1, 1, lost=(), replaced=())
    restarts.begin_attempt()
    rank.start()
    rank.reach(57)
    other = replace(FAILURE, cause="another")
    told = restarts.why_stop(other, -1)
    assert told == ("not restarting: restart 1 made no progress" if is_last else "")


@pytest.mark.parametrize(
    ("step", "saved", "is_counted", "told"),
    [
        (57, 50, False, "; from step 50, 7 steps lost"),
        (57, -1, False, "; from the beginning, 57 steps lost"),
        (57, 57, False, "; from step 57, 0 steps lost"),
        (57, -1, True, ""),  # the script may save by itself
        (-1, -1, False, ""),
    ],
)
def test_a_restart_is_one_line_with_its_cost(
    step: int, saved: int, is_counted: bool, told: str
) -> None:
    restart = Restart(1, "rank-error", "ValueError: x", "rank 3", step, saved, 0.0, is_counted)
    assert restart.describe(3) == f"restart 1 of 3 after rank 3: ValueError: x{told}"


def test_kills_from_outside_count_only_against_max_restarts(tmp_path: Path) -> None:
    beats = Beating(tmp_path).reach(57, saved=50)
    restarts, killed = Restarts(9, beats), replace(FAILURE, fault="rank-killed")
    for number in range(1, 6):
        restarts.begin_attempt()
        assert restarts.why_stop(killed, -1) == ""
        restarts.record_restart(killed, -1, number, lost=(), replaced=())


def test_a_newer_snapshot_is_a_gain(tmp_path: Path) -> None:
    beats = Beating(tmp_path).reach(57, saved=50)
    restarts, other = Restarts(9, beats), replace(FAILURE, cause="another")
    restarts.record_restart(FAILURE, 55, 1, lost=(), replaced=())
    restarts.begin_attempt()
    assert restarts.why_stop(other, 57) == ""
    told = restarts.why_stop(other, 55)
    assert told == "not restarting: restart 1 made no progress"


def test_what_a_restart_from_memory_reaches_counts(tmp_path: Path) -> None:
    """After the restart, the ranks neither save a checkpoint nor report the earlier one."""
    beating = Beating(tmp_path)
    assert beating.reach(160, saved=100).reached() == (100, 160)
    beating.start()
    assert beating.reach(150).reached() == (100, 160)
    assert beating.reach(190).reached() == (100, 190)


def test_a_restart_says_who_took_over_and_what_node_rank_0_knows(tmp_path: Path) -> None:
    beats = Beating(tmp_path).reach(57, saved=50)
    gone = replace(FAILURE, fault="agent-killed", cause="its node agent is gone", rank=-1, step=-1)
    restarts = Restarts(3, beats)
    told = restarts.record_restart(gone, -1, 2, lost=["node2"], replaced=["node5 replaces node2"])
    text = "restart 2 of 3 after node agent 1 (node2): its node agent is gone"
    assert told == f"{text}; node5 replaces node2; from step 50, 7 steps lost"
    assert restarts.all[0].lost == ("node2",)
    other = Restarts(3, Heartbeats(1)).record_restart(
        gone, -1, 1, lost=["node2"], replaced=()
    )  # on a new node rank 0
    assert other == text.replace("2 of 3", "1 of 3")


def test_a_loss_lasts_until_the_step_is_done_again(tmp_path: Path) -> None:
    rank = Beating(tmp_path)
    restarts = Restarts(3, rank.beats)
    restarts.record_progress()
    assert not restarts.has_begun
    rank.reach(0)
    restarts.record_progress()
    assert restarts.has_begun
    rank.reach(57, saved=50)
    restarts.record_restart(replace(FAILURE, time=time.time() - 20), -1, 1, lost=(), replaced=())
    rank.beats.clear()
    rank.reach(56)
    restarts.record_progress()
    assert not restarts.all[0].lost_s
    rank.reach(57)
    restarts.record_progress()
    assert restarts.all[0].lost_s == pytest.approx(20, abs=1)


SCRIPT = """
import torch
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(1, 11):
    parameter.grad = torch.ones(1)
    optimizer.step()
    if step == 7:
        raise ValueError("batch 7 holds no samples")
"""


@pytest.mark.slow
def test_a_real_run(runs: list[Run], tmp_path: Path) -> None:
    script = written(tmp_path / "script.py", SCRIPT)
    options = ["--nproc-per-node=1", "--max-restarts=5", f"--log-dir={tmp_path}", "--rdzv-id=x"]
    runs.append(Run([*options, str(script)]))
    err = runs[0].finish()
    assert "not restarting: step 7 failed twice with the same cause" in err
    assert (runs[0].process.returncode, err.count("node agent: restart ")) == (1, 1)
    record = json.loads((tmp_path / "x/run.json").read_text())
    assert [restart["fault"] for restart in record["restarts"]] == ["rank-error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("import no_such_module", "env-missing"),
        ("from os import no_such_name", "version-mismatch"),
        ("exec('a b')", "SyntaxError: invalid syntax"),
        ("import xml.etree.ElementTree as x; x.fromstring('<a>')", ""),  # a damaged file of data
    ],
)
def test_a_module_that_cannot_be_imported_restarts_nothing(
    script: str, cause: str, runs: list[Run], tmp_path: Path
) -> None:
    file = written(tmp_path / "script.py", script)
    runs.append(Run(["--nproc-per-node=1", "--max-restarts=2", f"--log-dir={tmp_path}", str(file)]))
    err = runs[0].finish()
    is_certain = f"not restarting: it would fail the same way ({cause}" in err
    assert (is_certain, err.count("node agent: restart ")) == ((True, 0) if cause else (False, 2))
