"""After a stop signal each rank has its time, and the end says what each did."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from agents import Run, kill_what_is_left, rarely
from torch.multiprocessing.spawn import start_processes

from distributed import limits, stop_signals
from distributed.stop import Stop
from distributed.stop_signals import STOP_SIGNALS

HEAD = """
import os, signal, sys, time
import torch.distributed as dist
from pathlib import Path

dist.init_process_group("gloo")
rank = dist.get_rank()
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
dist.barrier()
print(f"ready {rank}", flush=True)
while not asked:
    time.sleep(0.01)
"""
SLOW_SAVE = "time.sleep(3)\nPath(f'saved{rank}').write_text('all')\n"
PROGRAMS = {  # -> of rank 1; exit code, how the ranks ended
    "sys.exit(1)": (1, "rank 0 exited with code 0, rank 1 exited with code 1"),
    "raise KeyboardInterrupt": (130, "rank 0 exited with code 0, rank 1 ended by SIGINT"),
    "sys.exit(75)": (143, "rank 0 exited with code 0, rank 1 exited with code 75"),
    "time.sleep(60)": (143, "rank 0 exited with code 0, rank 1 killed after GRACE"),
    "pass": (143, "ranks 0-1 exited with code 0"),
}
OFTEN = "sys.exit(75)"


def begin(runs: list[Run], folder: Path, tail: str, *options: str, **environment: str) -> Run:
    """Start two ranks, and wait until they are ready to be stopped."""
    script = folder / "program.py"
    script.write_text(HEAD + tail)
    arguments = ["--nproc-per-node", "2", *options, str(script)]
    folder_of = {"LAUNCH_COMMAND": "again", "GRACE": "60", **environment}
    runs.append(Run(arguments, None, ["env", "-C", str(folder)], **folder_of))
    runs[-1].wait_for("ready 0", "ready 1")
    return runs[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "leaves",
    [OFTEN, *rarely(*(one for one in PROGRAMS if one != OFTEN))],
)
def test_one_that_leaves_does_not_end_the_save_of_another(
    runs: list[Run], tmp_path: Path, leaves: str
) -> None:
    tail = f"if rank == 1:\n    {leaves}\nelse:\n    " + SLOW_SAVE.replace("\n", "\n    ")
    grace = "10" if "sleep" in leaves else "60"  # all of it passes for the one that stays
    run = begin(runs, tmp_path, tail, GRACE=grace)
    run.process.terminate()
    err = run.finish()
    code, ends = PROGRAMS[leaves]
    assert (tmp_path / "saved0").read_text() == "all"
    assert run.process.returncode == code, err
    told = f"stopped  by SIGTERM: {ends} (code {code}); nothing is left running"
    assert err.splitlines()[-1] == told
    run.assert_gone()


def stop_at_random(folder: Path) -> tuple[bool, bool]:
    """Stop two ranks, of which one leaves at once and one saves for 5 s; is it saved, and told?"""
    slow = "else:\n    time.sleep(5)\n    Path(f'saved{rank}').write_text('all')\n"
    started: list[Run] = []
    try:
        run = begin(started, folder, "if rank == 1:\n    sys.exit(1)\n" + slow, GRACE="30")
        time.sleep(random.uniform(0, 1))  # the random moment itself, not a wait
        run.process.terminate()
        err = run.finish()
    finally:
        kill_what_is_left(started)
    told = "stopped  by SIGTERM: rank 0 exited with code 0, rank 1 exited with code 1 (code 1); "
    is_saved = (folder / "saved0").exists()
    return is_saved, err.endswith(told + "nothing is left running\n")


@pytest.mark.slow
def test_a_told_save_is_one_and_can_be_resumed(runs: list[Run], tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    tail = (
        f"sys.path.insert(0, {str(root)!r})\nfrom distributed.heartbeat import beat\n"
        "beat(saved=7)\nsys.exit(75)\n"
    )
    run = begin(runs, tmp_path, tail)
    run.process.send_signal(signal.SIGTERM)
    err = run.finish()
    assert run.process.returncode == 75
    assert "stopped  by SIGTERM after saving a checkpoint (code 75)" in err
    assert err.splitlines()[-1].startswith("resume   RUN_ID=") and err.endswith(" again\n")


# --- a request to stop, in a rank -----------------------------------------------------------------


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_stops_a_rank_on_its_own_at_the_next_step(signum: signal.Signals) -> None:
    asked = Stop()
    asked.ask()
    assert not asked.agreed()
    os.kill(os.getpid(), signum)
    os.kill(os.getpid(), signum)  # schedulers send it twice
    asked.ask()
    assert asked.agreed() and asked.reason == signum.name


def test_the_clock_stops_and_saves_too() -> None:
    for seconds, is_over in ((1000, False), (1e-9, True)):
        asked, saves = Stop(max_seconds=seconds), Stop(save_seconds=seconds)
        asked.ask()
        saves.ask()
        assert asked.agreed() == is_over and asked.reason == "max_seconds" * is_over
        assert not saves.agreed() and saves.is_save_agreed == is_over


def test_a_second_interrupt_a_while_later_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECOND_INTERRUPT_S", 0.0)
    Stop()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.001)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asked = Stop()
    os.kill(os.getpid(), signal.SIGHUP)
    asked.ask()
    assert not asked.agreed()


def _step_until_stopped(rank: int, folder: str) -> None:
    meeting = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=3)
    asked = Stop()
    step = 0
    while not asked.agreed():
        step += 1
        if rank == 2 and step == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        asked.ask()
    Path(folder, str(rank)).write_text(f"{step} {asked.reason}")
    torch.distributed.barrier()


def test_a_sigint_that_arrives_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    interrupts = stop_signals.Interrupts()
    is_second = []
    for seconds in (0.0, 0.1, 0.1, 0.2):
        now += seconds
        is_second.append(interrupts.is_second())
    assert is_second == [False, False, False, True]


@pytest.mark.slow
def test_all_ranks_stop_at_the_same_step(tmp_path: Path) -> None:
    start_processes(_step_until_stopped, (str(tmp_path),), nprocs=3, start_method="fork")  # type: ignore[no-untyped-call]
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["5 ", "5 ", "5 SIGUSR1"]
