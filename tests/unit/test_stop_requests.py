"""One request to save is one save; children of a process that has a Stop can be ended."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader

from distributed import limits
from distributed import torch as helper
from distributed.checkpoint.one_call import complete
from distributed.stop import Stop
from distributed.stop_signals import STOP_SIGNALS


def take_step(stop: Stop) -> bool:
    stop.ask()
    assert not stop.agreed() and not stop.agreed()  # the loop of the page calls it twice
    return stop.is_save_agreed


@pytest.fixture
def own_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only a test moves; every step looks for files."""
    now = [1000.0]
    monkeypatch.setattr(limits, "STOP_LOOK_S", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("kind", [Path, str])
def test_a_file_is_one_request(
    tmp_path: Path, own_clock: list[float], kind: type[Path] | type[str]
) -> None:
    stop = Stop(folder=kind(tmp_path))
    for _ in range(2):
        (tmp_path / "save").touch()
        assert [take_step(stop) for _ in range(4)] == [True, False, False, False]


def test_the_clock_asks_once_per_interval(own_clock: list[float]) -> None:
    stop, found = Stop(save_seconds=10), []
    for _ in range(25):
        own_clock[0] += 1
        found.append(take_step(stop))
    assert [second for second, is_save in enumerate(found, 1) if is_save] == [10, 20]


def test_any_save_restarts_the_clock(tmp_path: Path, own_clock: list[float]) -> None:
    before = Stop(save_seconds=10)
    own_clock[0] += 8
    model = nn.Linear(1, 1)
    helper.save(tmp_path / "run", 1, model, torch.optim.SGD(model.parameters()))
    own_clock[0] += 8
    assert not take_step(before)
    own_clock[0] += 2
    assert take_step(before)
    complete(0)


def _steps_until_saves(rank: int, folder: Path) -> None:
    limits.STOP_LOOK_S = 0.0
    stop, saved = Stop(folder=folder if rank == 1 else None), []
    for step in range(6):
        if rank == 1 and step == 2:
            (folder / "save").touch()
        if take_step(stop):
            saved.append(step)
    (folder / f"saved {rank}").write_text(str(saved))
    helper.barrier()


@pytest.mark.slow
def test_all_ranks_save_once_at_the_same_step(tmp_path: Path) -> None:
    on_ranks(2, _steps_until_saves, tmp_path)
    assert [(tmp_path / f"saved {rank}").read_text() for rank in (0, 1)] == ["[2]", "[2]"]


# --- children -----------------------------------------------------------------------------------


FORK: Any = multiprocessing.get_context("fork")


def handlers() -> list[str]:
    return [str(signal.getsignal(one)) for one in STOP_SIGNALS]


def sleep(*_: object) -> None:
    time.sleep(1000)


@pytest.fixture
def usual() -> list[str]:
    """The handlers before the first Stop, of which one is the script's own."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, sleep)
    found = handlers()
    for _ in range(2):
        Stop()
    assert handlers() != found
    return found


def test_forked_children_have_the_handlers_from_before(usual: list[str]) -> None:
    ours = handlers()
    with FORK.Pool(1) as pool, ProcessPoolExecutor(1, FORK) as executor:
        assert pool.apply(handlers) == usual == executor.submit(handlers).result()
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, repr(handlers()).encode())
        os._exit(0)
    os.wait()
    assert os.read(reading, 9999).decode() == repr(usual)
    assert handlers() == ours


def test_children_can_be_ended(usual: list[str]) -> None:
    with FORK.Pool(2) as pool:
        pool.map_async(sleep, range(4))
    process = FORK.Process(target=sleep)
    process.start()
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    child.terminate()
    assert child.wait() == -signal.SIGTERM


def leave(*_: object) -> None:
    os._exit(0)


def test_a_handler_that_the_script_sets_later_is_kept(usual: list[str]) -> None:
    signal.signal(signal.SIGTERM, leave)  # the pool ends its process by this signal
    with FORK.Pool(1) as pool:
        assert pool.apply(handlers)[0] == str(leave)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Pids(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return os.getpid()

    def __len__(self) -> int:
        return 64


def test_data_workers_ignore_stop_signals_and_can_be_ended(usual: list[str]) -> None:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = helper.get_dataloader_for_distributed(Pids(), 1, shuffle=False, **options)
    assert isinstance(loader, DataLoader)
    batches = iter(loader)
    worker = int(next(batches))
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(worker, signum)
    assert {int(one) for one in batches} == {worker}
