"""A stop request to any rank stops all ranks at the end of the same step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from distributed import limits, stop_signals
from distributed.stop import Stop
from distributed.stop_signals import STOP_SIGNALS


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_stops_a_rank_on_its_own_at_the_next_step(signum: signal.Signals) -> None:
    asked = Stop()
    asked.ask()
    assert not asked.agreed()
    os.kill(os.getpid(), signum)
    os.kill(os.getpid(), signum)  # schedulers send it twice
    asked.ask()
    assert asked.agreed() and asked.reason == signum.name


def test_the_clock_stops_too() -> None:
    later, now = Stop(max_seconds=1000), Stop(max_seconds=1e-9)
    later.ask()
    now.ask()
    assert not later.agreed()
    assert now.agreed() and now.reason == "max_seconds"


def test_the_clock_saves_too_and_starts_anew_with_each_save() -> None:
    asked = Stop(save_seconds=1000)
    asked.ask()
    assert not asked.agreed() and not asked.is_save_agreed
    asked = Stop(save_seconds=1e-9)
    asked.ask()
    assert not asked.agreed() and asked.is_save_agreed


def test_a_file_saves_or_stops_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STOP_LOOK_S", 0.0)
    asked = Stop(folder=tmp_path)
    (tmp_path / "save").touch()
    asked.ask()
    assert not asked.agreed() and asked.is_save_agreed
    asked.note_save()
    asked.ask()
    assert not asked.agreed() and not asked.is_save_agreed
    for name in ("save", "stop"):
        (tmp_path / name).touch()
    asked.ask()
    assert asked.agreed() and asked.reason == "the file stop"
    assert not asked.is_save_agreed  # a stop saves anyway
    assert not any(tmp_path.iterdir())


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
