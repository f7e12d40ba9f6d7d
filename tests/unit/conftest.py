"""Set-up for all tests: each is isolated from the machine and from its user."""

import functools
import gc
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
import warm
from agents import Run, kill_what_is_left
from job_tools import job_plan

from distributed.checkpoint import saver
from distributed.stop_signals import STOP_SIGNALS
from launcher.plan.pbs import ask_qstat
from launcher.plan.plan import Plan

ROOT = Path(__file__).parents[2]

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("prove", deadline=2000, max_examples=10_000)

subprocess.Popen = warm.Popen  # type: ignore[misc]  # subprocess.run() uses it too

# A runner in the background ignores SIGINT, and so would everything that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is loaded, set up the same environment that the bats tests have."""
    folder = tempfile.mkdtemp(prefix="tests-")
    config.add_cleanup(functools.partial(shutil.rmtree, folder))
    isolate(folder)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers' torch; more threads would only spin
    gc.disable()  # imports create only objects that stay


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Record in pytest's report which row of `make test-torch` each test belongs to."""
    for item in items:
        if mark := item.get_closest_marker("another_torch"):
            item.user_properties.append(("another_torch", mark.args[0]))


def pytest_collection_finish() -> None:
    """Undo the settings for the imports; the tests' programs set OMP_NUM_THREADS themselves."""
    os.environ.pop("OMP_NUM_THREADS", None)
    gc.freeze()
    gc.enable()


LEFT_OUT = pytest.StashKey[int]()  # number of tests omitted by -m or -k


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Have a worker report how many tests it omits: only workers collect tests."""
    if items and (told := getattr(items[0].config, "workeroutput", None)) is not None:
        told["deselected"] = told.get("deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """Store the number that a worker reports; all workers report the same."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("deselected", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the number of omitted tests, for tests/run.sh."""
    if LEFT_OUT in config.stash:
        terminalreporter.write_line(f"{config.stash[LEFT_OUT]} deselected")


def isolate(folder: str) -> None:
    """Replace the environment; `folder` will hold the replacements for folders of PATH."""
    script = 'source "$0"; isolate "$1"; env -0'
    command = ["bash", "-c", script, str(ROOT / "tests/isolate.bash"), folder]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.split(b"\0")[:-1]
    os.environb.clear()
    parts = (line.partition(b"=") for line in said)
    os.environb.update({name: value for name, _, value in parts})
    os.environ["HOME"] = folder
    os.umask(0o022)


@pytest.fixture(autouse=True)
def own_place(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Give each test an empty HOME and the project as its working folder; undo its changes."""
    monkeypatch.chdir(ROOT)
    ask_qstat.cache_clear()
    with mock.patch.dict(os.environ, HOME=str(tmp_path_factory.mktemp("home"))):
        yield


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Undo changes to signal masks and handlers, which later tests' programs would inherit."""
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@pytest.fixture(autouse=True)
def own_savers() -> Iterator[None]:
    """Forget the savers of a test: a later load in this process would warn of their failures."""
    yield
    saver._savers.clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of this process, moved by the test; sums of whole seconds are exact."""
    now = [1000.0]
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: now[0])
    return now


@pytest.fixture
def listener() -> Iterator[int]:
    """Return a port on which a socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture
def shell() -> Iterator[str]:
    """Return the process id of a shell that waits for commands, as `srun --pty bash` does."""
    pipe = subprocess.PIPE
    with subprocess.Popen(["bash"], bufsize=0, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"echo\n")  # once it answers, it is running
        process.stdout.readline()
        yield str(process.pid)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A run in a SLURM job."""
    return job_plan(tmp_path)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tools that comes first in PATH."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """The runs that a test starts, which must not outlive it."""
    started: list[Run] = []
    yield started
    kill_what_is_left(started)
