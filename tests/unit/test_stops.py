"""After a stop signal, each rank has time to save, and the last line shows what each did."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from agents import ROOT, Run, execute, kill_what_is_left, rarely
from forked_ranks import on_ranks

from distributed import limits, stop_signals
from distributed.stop import Stop
from distributed.stop_signals import STOP_SIGNALS
from distributed.torch import barrier

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
PROGRAMS = {  # what rank 1 does -> exit code, how the ranks ended
    "sys.exit(1)": (1, "rank 0 exited with code 0, rank 1 exited with code 1"),
    "raise KeyboardInterrupt": (130, "rank 0 exited with code 0, rank 1 ended by SIGINT"),
    "sys.exit(75)": (143, "rank 0 exited with code 0, rank 1 exited with code 75"),
    "time.sleep(60)": (143, "rank 0 exited with code 0, rank 1 killed after GRACE"),
    "pass": (143, "ranks 0-1 exited with code 0"),
}
OFTEN = "sys.exit(75)"


def stop(
    runs: list[Run], folder: Path, leaves: str, *, save_s: float = 3, after_s: float = 0
) -> tuple[bool, str]:
    """Stop two ranks, one of which exits while the other saves for `save_s`.

    Returns whether the end was reported correctly, and all output.
    """
    script, save = folder / "program.py", f"Path({str(folder)!r}, 'saved').write_text('all')"
    tail = f"if rank == 1:\n    {leaves}\nelse:\n    time.sleep({save_s})\n    {save}\n"
    script.write_text(HEAD + tail)
    grace = "10" if "sleep" in leaves else "60"  # a rank that stays uses all of it
    run = Run(["--nproc-per-node=2", str(script)], LAUNCH_COMMAND="again", GRACE=grace)
    runs.append(run)
    run.wait_for("ready 0", "ready 1")
    time.sleep(after_s)  # the moment itself, not a wait
    run.process.terminate()
    err = run.finish()
    code, ends = PROGRAMS[leaves]
    told = f"stopped  by SIGTERM: {ends} (code {code}); nothing is left running\n"
    return run.process.returncode == code and err.endswith(told), err


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [OFTEN, *rarely(*(one for one in PROGRAMS if one != OFTEN))])
def test_one_that_leaves_does_not_end_the_save_of_another(
    runs: list[Run], tmp_path: Path, leaves: str
) -> None:
    is_told, err = stop(runs, tmp_path, leaves)
    assert is_told, err
    assert (tmp_path / "saved").read_text() == "all"
    runs[0].assert_gone()


def stop_at_random(folder: Path) -> tuple[bool, bool]:
    """Stop two ranks: one exits at once, one saves for 5 s. Returns (is saved, is reported)."""
    runs: list[Run] = []
    try:
        told, _ = stop(runs, folder, "sys.exit(1)", save_s=5, after_s=random.uniform(0, 1))
    finally:
        kill_what_is_left(runs)
    return (folder / "saved").exists(), told


@pytest.mark.slow
def test_a_told_save_is_one_and_can_be_resumed(runs: list[Run], tmp_path: Path) -> None:
    tail = "sys.path.append(os.environ['KIT'])\nfrom distributed.heartbeat import beat\n"
    (tmp_path / "program.py").write_text(f"{HEAD}{tail}beat(saved=7)\nsys.exit(75)\n")
    arguments = ["--nproc-per-node=2", str(tmp_path / "program.py")]
    runs.append(run := Run(arguments, LAUNCH_COMMAND="again", GRACE="60"))
    run.wait_for("ready 0", "ready 1")
    run.process.terminate()
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
    os.kill(os.getpid(), signum)  # schedulers send the signal twice
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


def test_a_sigint_that_arrives_twice_is_one(clock: list[float]) -> None:
    interrupts = stop_signals.Interrupts()
    is_second = []
    for seconds in (0.0, 0.1, 0.1, 0.2):
        clock[0] += seconds
        is_second.append(interrupts.record_and_check())
    assert is_second == [False, False, False, True]


def _step_until_stopped(rank: int, folder: Path) -> None:
    asked = Stop()
    step = 0
    while not asked.agreed():
        step += 1
        if rank == 2 and step == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        asked.ask()
    (folder / str(rank)).write_text(f"{step} {asked.reason}")
    barrier()


@pytest.mark.slow
def test_all_ranks_stop_at_the_same_step(tmp_path: Path) -> None:
    on_ranks(3, _step_until_stopped, tmp_path)
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["5 ", "5 ", "5 SIGUSR1"]


def test_a_second_stop_before_the_start_shows_no_traceback() -> None:
    program = """
import atexit, os, signal
from launcher.interrupt import leave_unstarted
signal.signal(signal.SIGTERM, leave_unstarted)
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = execute(ROOT, sys.executable, "-c", program, code=143)
    assert done.stderr == "stopped  by SIGTERM; nothing was started\n"
