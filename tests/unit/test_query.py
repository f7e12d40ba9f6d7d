"""Scripts that know nothing of this project: their steps count, and all ranks' places are shown."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from agents import PATIENCE_S, ROOT, Run

from distributed.heartbeat import Heart, find_record
from launcher.agent.diagnosis.stuck import RankState
from launcher.agent.node_ranks import Heartbeats, NodeRanks
from launcher.agent.nodes.protocol import MESSAGES, NodeStacks
from launcher.agent.query import Query
from launcher.agent.rank.optimizer_steps import StepCounter
from launcher.typed_json import MessageError

LOOPS = str(ROOT / "tests/unit/own_loops.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "where", "steps"),
    [
        pytest.param("plain", "data", 30, marks=pytest.mark.another_torch("hang")),
        pytest.param("plain", "validation", 31, marks=pytest.mark.long),
        pytest.param("accumulated", "data", 30, marks=pytest.mark.long),
        pytest.param("two", "data", 60, marks=pytest.mark.long),
    ],
)
def test_the_rank_that_hangs_is_named_with_its_step(
    runs: list[Run], kind: str, where: str, steps: int
) -> None:
    run = Run(["--nproc-per-node=3", LOOPS, kind, "30", "1", where], HANG_SECONDS="12")
    runs.append(run)
    err = run.finish()
    run.assert_gone()
    block = err[err.index("FAILED") :]
    assert block.startswith("FAILED   rank 1 (local rank 1, ") and "[rank-stuck]" in block
    assert f", at step {steps} " in block
    assert "no sign of life for " in block and "; the limit, HANG_SECONDS, is 12 s" in block
    assert f"in {'read_batch' if where == 'data' else 'validate'}" in block.splitlines()[2]
    assert run.process.returncode == 137


@pytest.mark.slow
def test_a_hang_before_the_first_step_ends_the_run(runs: list[Run]) -> None:
    """HANG_SECONDS counts from the start of the ranks."""
    run = Run(["--nproc-per-node=2", LOOPS, "plain", "0", "1"], HANG_SECONDS="6")
    runs.append(run)
    err = run.finish()
    run.assert_gone()
    block = err[err.index("FAILED") :]
    assert block.startswith("FAILED   rank 1 (local rank 1, ") and "[rank-stuck]" in block
    assert ", before its first step; the limit, HANG_SECONDS, is 6 s" in block
    assert "in read_batch" in block.splitlines()[2]
    assert run.process.returncode == 137


@pytest.mark.parametrize(
    ("step", "when"),
    [
        (-1, "since the start of the ranks"),
        (9, "over 10 times the longest, after step 9"),
    ],
)
def test_without_a_limit_a_silence_is_told_once(step: int, when: str) -> None:
    shown: list[str] = []
    query = Query(NodeRanks([], Heartbeats(1), 0, "here"), ["here"], {}, shown.append, None)
    suspect = RankState(1, (step, 0), True, False, 601.0, ends_run=False)
    for _ in range(2):
        query.ask_about(suspect)
        assert query.on_time() is None
    assert [line.partition(": all ranks")[0] for line in shown] == [f"no step for 601 s, {when}"]


@pytest.mark.slow
def test_a_silence_is_told_once_and_ends_nothing() -> None:
    """With a limit shortened to 2 s in the agent."""
    short = "from distributed import heartbeat as h, limits\n"
    short += "limits.FIRST_SILENCE_S = 2.0; h.LIMIT_OF_LONGEST = 0\n"
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{short}"
    start += "from launcher.agent.supervisor import main\nsys.exit(main())"
    command = [sys.executable, "-c", start, "--nproc-per-node=2", LOOPS, "plain", "5", "1"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert run.stderr is not None
    told = ""
    while "read_batch" not in told:
        line = run.stderr.readline()
        assert line, told
        told += line
    time.sleep(5)
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    _, rest = run.communicate(timeout=PATIENCE_S)
    text = told + rest
    assert text.count("no step for ") == 1
    assert ", after step 5: rank 1 is behind; kill -QUIT " in text


@pytest.mark.long
def test_a_second_signal_of_the_scripts_own_and_its_forks_are_left_alone(
    runs: list[Run], tmp_path: Path
) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import os, signal, time, torch\n"
        "seen = []\n"
        "signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))\n"
        "parameter = torch.nn.Parameter(torch.ones(1))\n"
        "optimizer = torch.optim.SGD([parameter], lr=0.1)\n"
        "parameter.grad = torch.ones(1)\n"
        "optimizer.step()\n"
        "if os.fork() == 0:\n"
        "    [optimizer.step() for _ in range(50)]\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "optimizer.step()\n"
        "print('ready', flush=True)\n"
        "go = os.path.join(os.path.dirname(__file__), 'go')\n"
        "while not os.path.exists(go): time.sleep(0.01)\n"
        "assert not seen\n"
        "raise ValueError('the end')\n"
    )
    run = Run(["--nproc-per-node=1", f"--log-dir={tmp_path}", "--rdzv-id=x", str(script)])
    runs.append(run)
    run.wait_for("ready")
    run.process.send_signal(signal.SIGQUIT)
    shown = tmp_path / "x/stacks.txt"
    while not shown.exists():
        time.sleep(0.02)
    (tmp_path / "go").touch()
    err = run.finish()
    assert "the end" in err and ", at step 2 " in err


def test_what_another_node_tells_is_shown_harmlessly() -> None:
    with pytest.raises(MessageError):
        MESSAGES.read('{"stacks":{"ranks":[{"rank":"x","frames":["a.py:1 in f"]}]}}')
    told = MESSAGES.read('{"stacks":{"ranks":[{"rank":7,"frames":["\\u001b[2Ja.py:1 in f"]}]}}')
    shown: list[str] = []
    ranks = NodeRanks([], Heartbeats(1), 0, "here")
    query = Query(ranks, ["here", "there"], {1: None}, shown.append, None)  # type: ignore[dict-item]
    query._told[0] = NodeStacks([])
    query.receive(1, told)
    assert query.on_time() is None
    assert shown[0].splitlines()[1] == "  rank 7: \\x1b[2Ja.py:1 in f"


def test_steps_are_counted_until_the_script_beats(tmp_path: Path) -> None:
    beats = Heartbeats(1)
    place = find_record(beats.name(0))
    assert place is not None
    counter = StepCounter(Heart(*place, tmp_path / "a.stack", is_counted=True))
    model = torch.nn.Linear(1, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    assert beats.read(0).progress == (-1, 0) and not beats.are_counted()
    seen = []
    for optimizer in (first, second, second, first):
        counter(optimizer, (), {})
        seen.append(beats.read(0).progress)
    assert seen == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert beats.are_counted()
    own = Heart(*place, tmp_path / "b.stack")
    own.beat(7, None, None)
    counter(first, (), {})
    assert (beats.read(0).step, beats.are_counted()) == (7, False)
    own.beat(8, None, None)
    counter(first, (), {})
    assert beats.read(0).step == 8
